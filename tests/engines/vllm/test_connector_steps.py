"""What is stored where the connector looks at what is new only: what vLLM's own looks find, some
blocks together."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events, scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.request import RequestStatus

from deployments.engines.vllm.kv import connector_steps
from deployments.engines.vllm.kv.kv_offload import SlabManager

pytestmark = pytest.mark.spec("G4", "N1")
STEPS, MOST_RUNNING = 300, 6


class Theirs(scheduler.OffloadingConnectorScheduler):
    """With vLLM's own looks, whatever an engine in this process has put in their place."""

    _update_req_states = connector_steps._theirs_update
    _build_store_jobs = connector_steps._theirs_build


class Ours(scheduler.OffloadingConnectorScheduler):
    _update_req_states = connector_steps._update_req_states
    _build_store_jobs = connector_steps._build_store_jobs
    _lookup = connector_steps._lookup


class Manager(SlabManager):
    """Takes all that it is given, and keeps its order by request."""

    def __init__(self) -> None:
        self.stored: dict[str, list[bytes]] = {}
        self.awaited: set[str] = set()
        self.looks_count = 0

    def prepare_store(self, keys: Any, req_context: ReqContext) -> PrepareStoreOutput:
        self.stored.setdefault(req_context.req_id, []).extend(keys)
        return PrepareStoreOutput(list(keys), CPULoadStoreSpec(list(range(len(keys)))), [])

    def still_awaits(self, req_context: ReqContext) -> bool:
        return req_context.req_id in self.awaited

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        self.looks_count += 1
        return LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None: ...

    def on_request_finished(self, req_context: ReqContext) -> None: ...


def side(
    kind: type[Any], size: int, most_tokens: int | None, groups_count: int, *, drafts: bool
) -> Any:
    """The connector's scheduler of a model with groups of blocks of so many tokens, perhaps those
    of a drafter."""
    groups = tuple(
        scheduler.GroupOffloadConfig(
            group_idx=number,
            tokens_per_block=size,
            tokens_per_chunk=size,
            hashes_per_chunk=1,
            kv_event_group_spec=None,
            sliding_window_size_in_chunks=None,
            kv_cache_spec=None,
            manager_cls=SimpleNamespace(reachable_block_mask=lambda *_, **__: None),
            is_eagle_group=drafts,
        )
        for number in range(groups_count)
    )
    made = object.__new__(kind)
    made.config = scheduler.SchedulerOffloadConfig(
        kv_group_configs=groups,
        blocks_per_chunk=1,
        tokens_per_hash=size,
        num_workers=1,
        offload_prompt_only=False,
        supports_partial_tail=False,
    )
    made.manager = Manager()
    made._lookup_groups, made._sliding_window_groups = tuple(range(groups_count)), ()
    made._req_status, made._jobs, made._block_id_to_pending_jobs = {}, {}, {}
    made._current_batch_load_jobs, made._current_batch_jobs_to_flush = {}, set()
    made._current_batch_allocated_block_ids, made._job_counter = set(), 0
    made._events_tracker = events.OffloadingEventsTracker(
        SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
    )
    made.most_tokens = most_tokens
    return made


class Request:
    """As far as the connector's scheduler looks at one."""

    kv_transfer_params = shared_prefix_boundary = None

    def __init__(self, name: str, prompt: int, answer: int, size: int) -> None:
        self.request_id, self.num_prompt_tokens, self.ends_at = name, prompt, prompt + answer
        self.num_computed_tokens, self.num_tokens, self._size = 0, prompt, size
        self.status = RequestStatus.RUNNING
        self.block_count = 0
        self.block_hashes: list[bytes] = []
        self.hash_blocks()

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def hash_blocks(self) -> None:
        while len(self.block_hashes) < self.num_tokens // self._size:
            self.block_hashes.append(f"{self.request_id} {len(self.block_hashes)}".encode())

    def allocate(self, count: int) -> list[int]:
        """Numbers of the blocks for so many tokens more, above 0."""
        before = self.block_count
        self.block_count = -(-(self.num_computed_tokens + count) // self._size)
        return list(range(before + 1, self.block_count + 1))


def track(side: Any, request: Request) -> None:
    side._req_status[request.request_id] = scheduler.RequestOffloadState(
        side.config, request, ReqContext(request.request_id), RequestOffloadingContext()
    )
    side._req_status[request.request_id].max_offload_tokens = side.most_tokens


class Engine:
    """Gives each side the same random steps, as an engine takes them: prompts in parts, answers by
    a token, or by up to three as with a drafter; some requests are aborted, some preempted."""

    def __init__(self, sides: list[Any], size: int, seed: int) -> None:
        self.sides, self.size, self.dice = sides, size, random.Random(seed)
        self.groups_count = len(sides[0].config.kv_group_configs)
        self.lost: set[str] = set()  # which were preempted since the last step
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.ended: list[Request] = []
        self.told: set[str] = set()  # whose end the next step tells

    def run(self) -> list[Request]:
        """The requests whose end was told."""
        for number in range(STEPS):
            new, resumed = self.admit(number)
            counts = {one.request_id: self.part(one) for one in self.running}
            step = self.planned(counts, new, resumed)
            for each in self.sides:
                each.build_connector_meta(step)
            self.told, self.lost = set(), set()
            for one in list(self.running):
                self.compute(one, counts[one.request_id])
        return [one for one in self.ended if one.request_id not in self.told]

    def admit(self, number: int) -> tuple[list[Request], set[str]]:
        """Requests that are new in this step, and names of those that run again."""
        if len(self.running) == MOST_RUNNING or self.dice.random() < 0.5:
            return [], set()
        if self.preempted and self.dice.random() < 0.5:
            self.running.append(self.preempted.pop())
            return [], {self.running[-1].request_id}
        lengths = self.dice.randint(1, 6 * self.size), self.dice.randint(1, 8 * self.size)
        made = Request(f"r{number}", *lengths, self.size)
        self.running.append(made)
        for each in self.sides:
            track(each, made)
        return [made], set()

    def part(self, one: Request) -> int:
        """How many tokens of it are computed in this step."""
        left = one.num_tokens - one.num_computed_tokens
        if left > 1:
            return min(left, self.dice.choice([self.size // 2 + 1, 4 * self.size]))
        return self.dice.choice([1, 1, 3])

    def planned(self, counts: dict[str, int], new: list[Request], resumed: set[str]) -> Any:
        blocks = {
            one.request_id: (one.allocate(counts[one.request_id]),) * self.groups_count
            for one in self.running
        }
        cached = [one.request_id for one in self.running if one not in new]
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            finished_req_ids=self.told,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one.request_id, block_ids=blocks[one.request_id])
                for one in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                new_block_ids=[blocks[name] if blocks[name][0] else None for name in cached],
                resumed_req_ids=resumed,
            ),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
            preempted_req_ids=self.lost,
        )

    def compute(self, one: Request, count: int) -> None:
        one.num_computed_tokens += count
        if (drafts := one.num_computed_tokens - one.num_tokens) >= 0:
            one.num_tokens += self.dice.randint(1, 1 + drafts)
            one.num_computed_tokens = one.num_tokens - 1
            one.hash_blocks()
        if one.num_tokens >= one.ends_at:
            self.end(one, RequestStatus.FINISHED_STOPPED)
        elif self.dice.random() < 0.01:
            self.end(one, RequestStatus.FINISHED_ABORTED)
        elif self.dice.random() < 0.02:
            self.running.remove(one)
            self.preempted.append(one)
            self.lost.add(one.request_id)
            one.num_computed_tokens = one.block_count = 0

    def end(self, one: Request, status: RequestStatus) -> None:
        """As `request_finished` of the connector has it."""
        one.status = status
        self.running.remove(one)
        self.ended.append(one)
        self.told.add(one.request_id)
        for each in self.sides:
            each._req_status[one.request_id].update_offload_keys()


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("most_blocks", [None, 3])
@pytest.mark.parametrize(("groups_count", "drafts"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_stored_are_those_of_vllms_own_looks(
    seed: int,
    groups_count: int,
    drafts: bool,
    most_blocks: int | None,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_steps, "STORED_TOGETHER", 0)
    most = most_blocks and most_blocks * size
    sides = [side(kind, size, most, groups_count, drafts=drafts) for kind in (Theirs, Ours)]
    theirs, ours = sides
    assert len(Engine(sides, size, seed).run()) > 5
    assert theirs.manager.stored and ours.manager.stored == theirs.manager.stored
    assert ours._job_counter == theirs._job_counter
    jobs = [{job.req_id: job.deferred_fence_block_ids for job in s._jobs.values()} for s in sides]
    assert jobs[0] == jobs[1]


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_stored_in_fewer_jobs_and_whole_once_their_request_has_ended(seed: int) -> None:
    sides = [side(kind, 16, None, 1, drafts=False) for kind in (Theirs, Ours)]
    theirs, ours = sides
    ended = Engine(sides, 16, seed).run()
    assert len(ended) > 5
    for one in ended:
        name, is_aborted = one.request_id, one.status is RequestStatus.FINISHED_ABORTED
        # What is aborted while it is computed again, behind a preemption, may lack some blocks.
        assert is_aborted or ours.manager.stored.get(name) == theirs.manager.stored.get(name)
    for name, keys in theirs.manager.stored.items():
        late = len(keys) - len(ours.manager.stored.get(name, ()))
        assert 0 <= late < connector_steps.STORED_TOGETHER // 16
    assert ours._job_counter < 0.7 * theirs._job_counter


class Looked(dict[str, Any]):
    """Requests by name, and how often one was looked at."""

    count = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


def answer(engine: Engine, one: Request, count: int) -> None:
    """Steps of one token each."""
    for _ in range(count):
        engine.sides[0].build_connector_meta(engine.planned({one.request_id: 1}, [], set()))
        one.num_computed_tokens += 1
        one.num_tokens += 1
        one.hash_blocks()


def test_request_that_answers_is_looked_at_once_it_has_enough_to_store() -> None:
    ours = side(Ours, 16, None, 1, drafts=False)
    engine, one = Engine([ours], 16, 0), Request("r", 64, 1_000, 16)
    track(ours, one)
    engine.running = [one]
    ours.build_connector_meta(engine.planned({"r": 64}, [one], set()))
    one.num_computed_tokens, one.num_tokens = 64, 65
    assert [len(keys) for keys in ours.manager.stored.values()] == [4]
    looked = ours._req_status = Looked(ours._req_status)
    answer(engine, one, 63)
    assert looked.count == 1, "the first one learns when it will have enough"
    answer(engine, one, 5 * 64)
    assert len(ours.manager.stored["r"]) == 6 * 4
    assert looked.count < 20


def test_short_prompt_is_stored_with_the_begin_of_its_answer() -> None:
    ours = side(Ours, 16, None, 1, drafts=False)
    engine, one = Engine([ours], 16, 0), Request("r", 48, 1_000, 16)
    track(ours, one)
    engine.running = [one]
    ours.build_connector_meta(engine.planned({"r": 48}, [one], set()))
    one.num_computed_tokens, one.num_tokens = 48, 49
    answer(engine, one, 15)
    assert not ours.manager.stored
    answer(engine, one, 1)
    assert len(ours.manager.stored["r"]) == 4 and ours._job_counter == 1


def test_requests_that_have_ended_leave_nothing_behind() -> None:
    ours = side(Ours, 16, None, 1, drafts=False)
    engine, build, noted = Engine([ours], 16, 0), ours.build_connector_meta, set[str]()

    def build_and_note(step: Any) -> None:
        build(step)
        noted.update(vars(ours)["_looks"].not_before)

    ours.build_connector_meta = build_and_note
    ended = {one.request_id for one in engine.run()}
    assert len(noted & ended) > 5
    assert (
        vars(ours)["_looks"].not_before.keys()
        <= {one.request_id for one in [*engine.running, *engine.preempted]} | engine.told
    )


def test_request_that_awaits_its_last_row_is_not_looked_up_and_is_afterwards() -> None:
    ours = side(Ours, 16, None, 1, drafts=False)
    one = Request("r", 640, 1, 16)
    track(ours, one)
    state = ours._req_status["r"]
    state.update_offload_keys()
    ours.manager.awaited.add("r")
    assert ours._lookup(state) is None and ours.manager.looks_count == 0
    ours.manager.awaited.clear()
    assert ours._lookup(state) == 0 and ours.manager.looks_count == 1, "the first is a miss"
