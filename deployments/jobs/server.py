"""The `jobs` deployment: one replica on the head node, where the state file is, started by the
first use or by unfinished work and gone when there has been neither for a while (JobsPolicy)."""

import asyncio
import contextlib
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from arbiter.client.admin import call_arbiter
from arbiter.errors import ArbiterUnavailable
from deployments.config.schema import Table, parse_table
from deployments.front.inference.service import InferenceService
from deployments.jobs.batch_store import Batch, NewBatch
from deployments.jobs.database import state_path
from deployments.jobs.errors import NewerStateFile, StorageFailed, StorageFull
from deployments.jobs.service import JobsService
from deployments.jobs.store import Job, NewJob

logger = logging.getLogger("ray.serve")

NAME = "jobs"
POLICY = "deployments.jobs.scaling:JobsPolicy"
HEAD = {"node:__internal_head__": 0.001}  # Ray's own mark; Serve's controller is placed by it too

TABLE_S = 5.0  # the arbiter's table is asked for again after this long, while there is work


class JobsServer(JobsService):
    """The service with the arbiter's table, on Serve."""

    def __init__(self, state_file: str) -> None:
        self._inference = InferenceService()
        self._table: object = None
        self._read_at = self._accepted_at = -TABLE_S
        self._path = state_path(state_file)
        self._refusal: NewerStateFile | StorageFull | StorageFailed | None = None
        self._open()

    def _open(self) -> None:
        """Takes the jobs over, or refuses every call with what is wrong: a replica that does not
        start would tell callers nothing, and after three of them Serve starts no other."""
        try:
            super().__init__(self._path, self._current)
        except (NewerStateFile, StorageFull, StorageFailed) as error:
            if self._refusal is None:
                logger.error("jobs refuses every call: %s", error)
            self._refusal = error
        else:
            self._refusal = None
            asyncio.get_running_loop().call_soon(self.start)

    async def answer(self, method: str, *args: Any) -> Any:
        """What that method gives. Raises what it raises; NewerStateFile, StorageFull and
        StorageFailed, whatever is asked."""
        if self._refusal is not None:
            raise self._refusal
        return await getattr(self, method)(*args)

    async def check_health(self) -> None:
        """See JobsService. A replica that refuses is well: another would refuse as well. Serve asks
        every two seconds, so a disk that is mended is used soon."""
        if self._refusal is None:
            await super().check_health()
        elif not isinstance(self._refusal, NewerStateFile):
            self._open()

    def start(self) -> None:
        super().start()
        self._tasks.append(asyncio.create_task(self._read_table()))

    async def _read_table(self) -> None:
        """The bounds of the table count from the start on, where there is an arbiter."""
        with contextlib.suppress(ArbiterUnavailable):
            await self._current()

    async def create(self, new: NewJob, body: bytes) -> Job:
        """See JobsService."""
        self._accepted_at = time.monotonic()
        return await super().create(new, body)

    async def create_batch(self, new: NewBatch) -> Batch:
        """See JobsService."""
        self._accepted_at = time.monotonic()
        return await super().create_batch(new)

    async def _current(self) -> InferenceService:
        """The front's service with the table that the arbiter has, or had a moment ago, but after
        the last work was accepted: it may name what is new in it. Raises ArbiterUnavailable."""
        now = time.monotonic()
        if now - self._read_at >= TABLE_S or self._read_at <= self._accepted_at:
            plain = await call_arbiter("table")
            self._read_at = now
            if plain != self._table:
                self._table = plain
                table = parse_table(plain, "the arbiter's table")
                self._inference.configure(table)
                self.config = table.jobs
        return self._inference


def scaling_of(table: Table) -> dict[str, object]:
    """What makes one deployment of jobs differ from another: the state file and this code."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(code).hexdigest()[:16]
    facts = {"state_file": table.arbiter.state_file or "", "digest": digest}
    return {"policy": {"policy_function": POLICY, "policy_kwargs": facts}}


def application(table: Table) -> Application:
    """Zero replicas until asked."""
    deployment = serve.deployment(
        JobsServer,
        name=NAME,
        max_ongoing_requests=1_000,  # long polls of events, mostly
        max_queued_requests=1_000,
        ray_actor_options={"num_cpus": 0, "resources": HEAD},
        graceful_shutdown_timeout_s=10,
        health_check_period_s=2,
        logging_config={"enable_access_log": False},
        autoscaling_config={
            "min_replicas": 0,
            "initial_replicas": 0,
            "max_replicas": 1,
            "metrics_interval_s": 0.1,
            "look_back_period_s": 0.5,
            "upscale_delay_s": 0,
            "downscale_delay_s": 5,
            **scaling_of(table),
        },
    )
    return deployment.bind(table.arbiter.state_file or "")
