"""Work of priority batch beside more urgent requests in one engine."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.request import RequestStatus

from arbiter.core.types import Priority
from deployments import messages
from deployments.engines.vllm.batching.batch_admission import BYPASSES
from deployments.engines.vllm.batching.batch_hold import BatchHold
from tests.support.engine_host import Child, ZygoteUnderTest, served, until

VLLM = "deployments.engines.vllm.engine:build"
MIB = 1 << 20
PLACES = 4
LINE_TOKENS = 400
BATCH = {messages.PRIORITY_HEADER: str(int(Priority.BATCH))}


def config(model: Path, **more: Any) -> dict[str, Any]:
    args = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * MIB,
        "max_model_len": 1024,
        "max_num_seqs": PLACES,
    }
    return {"model": str(model), "served_name": "tiny", "engine_args": {**args, **more}}


def ask(child: Child, text: str, tokens: int, headers: dict[str, str] | None = None) -> Any:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, got = child.call("POST", "/v1/chat/completions", body, headers)
    assert status == 200, got
    return got["choices"][0]["message"]["content"]


def facts(child: Child) -> Any:
    return child.call("GET", "/admission")[1]


@pytest.fixture(scope="module")
def lines(engines: ZygoteUnderTest, tiny: Path) -> Iterator[tuple[Child, dict[str, str]]]:
    """An engine, and what it answers to each line alone."""
    with served(engines, "held", VLLM, config(tiny)) as child:
        texts = [f"Line {n}" for n in range(PLACES)]
        yield child, {text: ask(child, text, LINE_TOKENS) for text in texts}


def begin(
    pool: ThreadPoolExecutor, child: Child, texts: list[str], least_count: int | None = None
) -> "dict[str, Future[Any]]":
    """Lines that all run, or `least_count` of them at once."""
    running = {text: pool.submit(ask, child, text, LINE_TOKENS, BATCH) for text in texts}
    until(lambda: facts(child)["running"] >= (least_count or len(texts)), 60)
    return running


@pytest.mark.spec("J4", "C2")
def test_urgent_prompt_is_computed_without_the_batch_and_each_line_ends_as_alone(
    lines: tuple[Child, dict[str, str]],
) -> None:
    child, alone = lines
    before = facts(child)["hold"]
    some = list(alone)[: PLACES - 1]
    with ThreadPoolExecutor(PLACES) as pool:
        running = begin(pool, child, some)
        for n in range(4):
            ask(child, f"A question, the {n}th", 2)
        assert not any(line.done() for line in running.values()), "the lines were too short"
        answers = {text: line.result() for text, line in running.items()}
    after = facts(child)["hold"]
    assert after["held"] >= before["held"] + 4
    assert after["beside"] == before["beside"]
    assert after["preempted"] == before["preempted"], "there was a place"
    assert answers == {text: alone[text] for text in some}


@pytest.mark.spec("J4", "C2")
def test_line_gives_up_its_place_where_all_are_taken_and_ends_as_alone(
    lines: tuple[Child, dict[str, str]],
) -> None:
    child, alone = lines
    before = facts(child)["hold"]
    with ThreadPoolExecutor(PLACES) as pool:
        running = begin(pool, child, list(alone))
        ask(child, "A question", 2)
        assert not any(line.done() for line in running.values()), "it waited for a line to end"
        answers = {text: line.result() for text, line in running.items()}
    after = facts(child)["hold"]
    assert after["preempted"] == before["preempted"] + 1
    assert after["beside"] == before["beside"]
    assert answers == alone


@pytest.mark.spec("J4", "C2")
def test_line_gives_up_its_blocks_where_the_cache_is_full(
    engines: ZygoteUnderTest, tiny: Path, lines: tuple[Child, dict[str, str]]
) -> None:
    """The cache has room for one request of the longest context."""
    _, alone = lines
    text = "count " * 120
    with served(engines, "full", VLLM, config(tiny, kv_cache_memory_bytes=6 * MIB)) as child:
        with ThreadPoolExecutor(PLACES) as pool:
            # vLLM takes a line out by itself once they have filled the cache.
            running = begin(pool, child, list(alone), PLACES - 2)
            # The first may find room that the lines have not filled yet.
            for number in itertools.count():
                if facts(child)["hold"]["preempted"]:
                    break
                ask(child, f"{number} {text}", 2)
                assert not any(line.done() for line in running.values()), "it waited for a line"
            answers = {line: future.result() for line, future in running.items()}
        hold = facts(child)["hold"]
    assert hold["beside"] == 0
    assert answers == alone


# -------------------------------------------------------------------------------------------------
# The rule, with a scheduler that computes nothing.


class Scheduler:
    """Each step takes what the queues have, but for requests that are `stuck`."""

    def __init__(self, places: int = 8) -> None:
        self.running: list[Any] = []
        self.waiting: Any = PriorityRequestQueue()
        self.kv_holding_waiting: Any = PriorityRequestQueue()
        self.requests: dict[str, Any] = {}
        self.deferred_waiting: set[Any] = set()
        self.deferred_frees: list[Any] = []
        self.current_step = 0
        self.places = places
        self.stuck: set[str] = set()
        self.is_endless = False  # prompts never come to their end

    def add(self, name: str, priority: int, *, computed: int = 0, loaded: int = 0) -> None:
        """`loaded`: tokens whose KV came out of a slab, so that it has blocks and waits."""
        one = Request(name, priority, float(len(self.requests)), computed or loaded)
        self.requests[name] = one
        if loaded:
            self.kv_holding_waiting.add_request(one)
        elif computed:
            one.status = RequestStatus.RUNNING
            self.running.append(one)
        else:
            self.waiting.add_request(one)

    def schedule(self) -> Any:
        self.current_step += 1
        step = [r for r in self.running if self.current_step >= r.next_decode_eligible_step]
        for queue in (self.kv_holding_waiting, self.waiting):
            for one in [r for r in queue if r.request_id not in self.stuck]:
                if len(self.running) < self.places:
                    queue.remove_request(one)
                    one.status = RequestStatus.RUNNING
                    self.running.append(one)
                    step.append(one)
        for one in step:
            one.num_computed_tokens += 0 if self.is_endless and one.is_prompt else 10
        return SimpleNamespace(num_scheduled_tokens={r.request_id: 1 for r in step})

    def _preempt_request(self, one: Any, _now_s: float, *, drop_stale_output: bool) -> None:
        assert drop_stale_output
        one.status, one.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.waiting.prepend_request(one)


class Request(SimpleNamespace):
    """What the rule reads of vLLM's own."""

    def __init__(self, name: str, priority: int, arrival_s: float, computed: int) -> None:
        super().__init__(
            request_id=name,
            priority=priority,
            arrival_time=arrival_s,
            num_computed_tokens=computed,
            num_prompt_tokens=10,
            next_decode_eligible_step=0,
            status=RequestStatus.WAITING,
        )

    __hash__ = object.__hash__

    @property
    def is_prompt(self) -> bool:
        return bool(self.num_computed_tokens < self.num_prompt_tokens)

    def __lt__(self, other: "Request") -> bool:
        return (self.priority, self.arrival_time) < (other.priority, other.arrival_time)


@pytest.fixture
def steps() -> tuple[Scheduler, Callable[[], set[str]], BatchHold]:
    scheduler = Scheduler()
    hold = BatchHold(scheduler)  # type: ignore[arg-type]
    return scheduler, lambda: set(hold.schedule().num_scheduled_tokens), hold


def test_batch_waits_for_a_prompt_and_for_nothing_else(steps: Any) -> None:
    scheduler, step, _ = steps
    scheduler.add("line", Priority.BATCH, computed=10)
    scheduler.add("next line", Priority.BATCH)
    assert step() == {"line", "next line"}
    scheduler.add("question", Priority.LOW)
    scheduler.add("third line", Priority.BATCH)
    assert step() == {"question"}
    assert step() == {"line", "next line", "third line", "question"}


def test_look_at_what_waits_does_not_sort_it(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own iteration would, in each step."""
    scheduler, _, hold = steps
    scheduler.add("line", Priority.BATCH)
    scheduler.add("question", Priority.NORMAL, loaded=5)
    monkeypatch.setattr(PriorityRequestQueue, "__iter__", lambda self: 1 / 0)
    assert [one.request_id for one in hold._batch_requests()] == ["line"]
    assert [one.request_id for one in hold._urgent_prompts()] == ["question"]


def test_batch_waits_for_a_prompt_though_both_hold_blocks_already(steps: Any) -> None:
    """As with a prefix out of the slab: vLLM has them in a queue of their own."""
    scheduler, step, _ = steps
    scheduler.add("line", Priority.BATCH, computed=10)
    scheduler.add("loaded line", Priority.BATCH, loaded=5)
    scheduler.add("question", Priority.NORMAL, loaded=5)
    assert step() == {"question"}
    assert [one.request_id for one in scheduler.kv_holding_waiting] == ["loaded line"]
    assert not scheduler.waiting, "it goes back to the queue that it was in"
    assert step() == {"line", "loaded line", "question"}


def test_without_an_end_of_prompts_every_ninth_step_has_the_batch(steps: Any) -> None:
    scheduler, step, hold = steps
    scheduler.is_endless = True
    scheduler.add("line", Priority.BATCH, computed=10)
    scheduler.add("question", Priority.NORMAL)
    with_batch = ["line" in step() for _ in range(3 * (BYPASSES + 1))]
    assert with_batch == ([False] * BYPASSES + [True]) * 3
    assert hold.trace.facts() == {"held": 3 * BYPASSES, "beside": 3, "preempted": 0}


def test_prompt_that_waits_for_something_else_holds_every_second_step_and_takes_no_place(
    steps: Any,
) -> None:
    scheduler, step, hold = steps
    scheduler.add("line", Priority.BATCH, computed=10)
    scheduler.add("question", Priority.NORMAL)
    scheduler.stuck.add("question")
    scheduler.requests["question"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert [step() for _ in range(4)] == [set(), {"line"}] * 2
    assert hold.trace.preempted == 0


def test_last_line_gives_up_its_place_and_has_the_next_that_is_free(steps: Any) -> None:
    scheduler, step, hold = steps
    scheduler.places = 2
    scheduler.add("line", Priority.BATCH, computed=10)
    scheduler.add("last line", Priority.BATCH, computed=10)
    scheduler.add("question", Priority.NORMAL)
    assert step() == set()
    assert step() == {"question"}
    assert step() == {"line", "question"}
    scheduler.running.remove(scheduler.requests["question"])
    assert step() == {"line", "last line"}
    assert hold.trace.preempted == 1


def test_no_second_line_gives_way_while_the_blocks_of_the_first_are_on_their_way(
    steps: Any,
) -> None:
    scheduler, step, hold = steps
    scheduler.places = 3
    for name in ("line", "next line", "last line"):
        scheduler.add(name, Priority.BATCH, computed=10)
    scheduler.add("question", Priority.NORMAL)
    scheduler.stuck.add("question")  # there is a place, and no blocks yet
    scheduler.deferred_frees = [(1, ["a block"])]
    assert step() == set() and hold.trace.preempted == 0
    scheduler.deferred_frees = []
    step()
    assert step() == set() and hold.trace.preempted == 1
