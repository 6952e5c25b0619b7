"""`multiplexed`: what Ray Serve itself offers, one deployment for each capability.

    python -m benchmarks.one_card.multiplexed FILE

FILE is JSON: the table, the port, bytes of each model and of the card. A model stays until another
of its capability takes its place, or its replica leaves after a pause; a load that finds no memory
fails, as on a card. The card is an actor that counts, because no GPU is here to refuse.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from benchmarks.one_card.engines import HOP, Engine, Starter
from benchmarks.one_card.player import NO_MEMORY

PAUSE_S = 60.0  # as our keep-warm
MODELS_AT_ONCE = 3  # Serve's default


@ray.remote(num_cpus=0)
class Card:
    """Bytes of the card that are lent."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._lent_bytes = most_bytes, 0
        self._loads = 0

    def take(self, size_bytes: int) -> bool:
        if self._lent_bytes + size_bytes > self._most_bytes:
            return False
        self._lent_bytes += size_bytes
        self._loads += 1
        return True

    def give_back(self, size_bytes: int) -> None:
        self._lent_bytes -= size_bytes

    def loads(self) -> int:
        return self._loads


class NoMemory(Exception):
    """A load found no memory on the card."""


class Loaded:
    """A model in a replica; Serve deletes it when it leaves."""

    def __init__(self, engine: Engine, card: Any, size_bytes: int) -> None:
        self.engine, self._card, self._size_bytes = engine, card, size_bytes

    async def __del__(self) -> None:
        await self.engine.end()
        await self._card.give_back.remote(self._size_bytes)


class Capability:
    """One capability, as the documentation of Serve has it."""

    def __init__(self, name: str, table: dict[str, Any], sizes: dict[str, int], card: Any) -> None:
        row = {"capabilities": {name: table["capabilities"][name]}}
        self._starter = Starter(row, is_fresh=False)
        self._prefix, self._sizes, self._card = f"/{name}", sizes, card

    @serve.multiplexed(max_num_models_per_replica=MODELS_AT_ONCE)  # type: ignore[untyped-decorator]
    async def model(self, name: str) -> Loaded:
        """Raises NoMemory."""
        if not await self._card.take.remote(self._sizes[name]):
            raise NoMemory(name)
        return Loaded(await self._starter.start(name), self._card, self._sizes[name])

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        try:
            loaded = await self.model(serve.get_multiplexed_model_id())
        except NoMemory as error:
            return Response(f"no memory for {error}", status_code=NO_MEMORY)
        kind = {"content-type": request.headers["content-type"]}
        path = request.url.path.removeprefix(self._prefix)
        said = await loaded.engine.session.post(path, data=body, headers=kind)
        headers = {k: v for k, v in said.headers.items() if k.lower() not in HOP}
        return StreamingResponse(said.content.iter_any(), said.status, headers)


SCALING = {
    "min_replicas": 0,
    "max_replicas": 1,
    "downscale_to_zero_delay_s": PAUSE_S,
    "downscale_delay_s": PAUSE_S,
    "upscale_delay_s": 0.0,
    "metrics_interval_s": 0.1,
    "look_back_period_s": 0.5,
}


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    ray.init(log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given["port"]})
    card = Card.options(name="card").remote(given["card_bytes"])  # type: ignore[attr-defined]
    targets = []
    for name in given["table"]["capabilities"]:
        deployment = serve.deployment(Capability).options(
            name=name,
            autoscaling_config=SCALING,
            max_ongoing_requests=256,
            ray_actor_options={"num_cpus": 0},
        )
        bound = deployment.bind(name, given["table"], given["sizes"], card)
        targets.append(serve.RunTarget(bound, name, f"/{name}"))
    serve.run_many(targets, wait_for_applications_running=False)
    Path(given["ready"]).write_text("ready")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    Path(given["ready"]).write_text(json.dumps({"loads": ray.get(card.loads.remote())}))
    serve.shutdown()


if __name__ == "__main__":
    main()
