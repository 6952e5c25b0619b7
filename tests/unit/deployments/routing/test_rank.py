"""Which replica gets a request: the one with the model, the adapter, the conversation, the prompt,
or least to do.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.pieces import KeptKv
from deployments.routing.rank import (
    FOLLOW_S,
    HELD_SHARE,
    KEYS,
    OVERLOAD_COUNT,
    AdapterSlots,
    ModelPresence,
    ReplicaState,
    RouteRequest,
    RoutingHistory,
    rank,
)

BASE, LAW = RouteRequest("m", "m"), RouteRequest("m", "m:law")
TALK = RouteRequest("m", "m", "acme/c-1")
HERE = {"m": ModelPresence.RESIDENT}

pytestmark = pytest.mark.spec("G3")


def test_a_resident_model_counts_before_any_queue() -> None:
    states = [
        ReplicaState("idle"),
        ReplicaState("asleep", 0, models={"m": ModelPresence.ASLEEP}),
        ReplicaState("coming", 9, models={"m": ModelPresence.COMING}),
        ReplicaState("here", 99, models=HERE),
    ]
    assert rank(BASE, states) == ["here", "coming", "asleep", "idle"]


@pytest.mark.spec("A11")
def test_nodes_that_refused_a_request_get_it_again_only_where_there_are_no_others() -> None:
    there, full = ReplicaState("there", node="n1"), ReplicaState("full", is_full=True, node="n2")
    again = RouteRequest("m", "m", refused_nodes=("n1",))
    assert rank(BASE, [full, there]) == ["there", "full"]
    assert rank(again, [full, there]) == ["full"], "it waits for room there"
    assert rank(again, [there]) == ["there"]


def test_adapter_slot_ranks_before_conversation_and_conversation_before_queue() -> None:
    law = RouteRequest("m", "m:law", "acme/c-1")
    states = [ReplicaState("free", 0, models=HERE), ReplicaState("talked", 1, models=HERE),
              ReplicaState("slot", 2, models=HERE, adapters=["m:law"])]  # fmt: skip
    assert rank(law, states, sticky="talked") == ["slot", "talked", "free"]


def test_base_model_needs_no_adapter_slot() -> None:
    states = [
        ReplicaState("slot", 1, models=HERE, adapters=["m:law"]),
        ReplicaState("free", 0, models=HERE),
    ]
    assert rank(BASE, states)[0] == "free"


def test_overload_moves_a_conversation_and_an_adapter_but_loads_no_second_copy() -> None:
    def states(more: int) -> list[ReplicaState]:
        busy = ReplicaState("busy", more, models=HERE, adapters=["m:law"])
        return [busy, ReplicaState("other", 0, models=HERE), ReplicaState("cold", 0)]

    for request in (TALK, LAW):
        assert rank(request, states(OVERLOAD_COUNT - 1), sticky="busy")[0] == "busy"
        assert rank(request, states(OVERLOAD_COUNT), sticky="busy") == ["other", "busy", "cold"]


def test_new_conversation_goes_where_most_of_its_prompt_was_sent_and_else_to_the_least_loaded() -> (
    None
):
    def states(share: float) -> list[ReplicaState]:
        knows = ReplicaState("knows", 2, models=HERE, held_share=share)
        return [knows, ReplicaState("free", 1, models=HERE, held_share=0.1)]

    assert rank(TALK, states(HELD_SHARE))[0] == "knows"
    assert rank(TALK, states(HELD_SHARE - 0.01))[0] == "free"
    assert rank(TALK, states(1.0), sticky="free")[0] == "free", "where it was comes first"


def test_of_replicas_that_know_a_prompt_the_least_loaded_and_none_that_is_overloaded() -> None:
    def states(more: int) -> list[ReplicaState]:
        knows = [
            ReplicaState(n, c, models=HERE, held_share=1.0) for n, c in (("a", more), ("b", 3))
        ]
        return [*knows, ReplicaState("c", 0, models=HERE)]

    for request in (TALK, LAW):  # the adapter has a slot nowhere
        assert rank(request, states(2)) == ["a", "b", "c"]
        assert rank(request, states(OVERLOAD_COUNT)) == ["b", "c", "a"]
        assert rank(request, states(OVERLOAD_COUNT), sticky="a") == ["b", "c", "a"]


OFFERS = st.lists(
    st.builds(
        ReplicaState,
        st.sampled_from("abcd"),
        st.integers(0, 2 * OVERLOAD_COUNT),
        models=st.just(HERE),
        held_share=st.sampled_from([0.0, HELD_SHARE - 0.1, HELD_SHARE, 1.0]),
    ),
    min_size=1,
    unique_by=lambda one: one.replica,
)


@given(OFFERS, st.sampled_from(["a", "b", None]))
def test_among_replicas_with_the_model_the_first_rule_that_any_meets_decides(
    states: list[ReplicaState], sticky: str | None
) -> None:
    least = min(one.queue_count for one in states)
    calm = [one for one in states if one.queue_count < least + OVERLOAD_COUNT]
    holders = [one for one in calm if one.held_share >= HELD_SHARE]
    own = [one for one in calm if one.replica == sticky]
    among = own or holders or calm
    best = min(among, key=lambda one: (one.queue_count, one.replica))
    assert rank(TALK, states, sticky=sticky)[0] == best.replica


def test_a_full_replica_is_the_last_to_be_asked() -> None:
    states = [ReplicaState("full", 8, is_full=True, models=HERE), ReplicaState("cold", 3)]
    assert rank(BASE, states, sticky="full", followed="full") == ["cold", "full"]


def test_calls_for_a_cold_model_follow_the_first_of_them() -> None:
    memory, states = RoutingHistory(), [ReplicaState("a", 5), ReplicaState("b", 0)]
    first = rank(BASE, states, followed=memory.followed("m", 0.0))[0]
    memory.note_sent(BASE, first, 0.0)
    assert first == "b"
    busier = [ReplicaState("a", 0), ReplicaState("b", 3)]
    assert rank(BASE, busier, followed=memory.followed("m", FOLLOW_S / 2))[0] == "b"
    assert memory.followed("m", FOLLOW_S) is None  # by then the replica has said what it has
    assert memory.followed("other", 0.0) is None


def test_a_conversation_does_not_leave_the_load_it_waited_for() -> None:
    """Its replica says only within a second that the model is there."""
    states = [ReplicaState("other", 0, models=HERE), ReplicaState("loaded", 0)]
    assert rank(TALK, states, sticky="loaded", followed="loaded")[0] == "loaded"
    assert rank(BASE, states, followed="loaded")[0] == "other"


def test_a_key_is_remembered_by_tenant_model_and_adapter_and_the_oldest_forgotten() -> None:
    memory = RoutingHistory()
    memory.note_sent(TALK, "a", 0.0)
    assert memory.sticky(TALK, 40.0) == "a"
    assert memory.sticky(RouteRequest("m", "m", "other/c-1"), 40.0) is None
    assert memory.sticky(RouteRequest("n", "n", "acme/c-1"), 40.0) is None
    assert memory.sticky(RouteRequest("m", "m:law", "acme/c-1"), 40.0) is None
    assert memory.sticky(BASE, 40.0) is None
    for number in range(KEYS):
        memory.note_sent(RouteRequest("m", "m", f"acme/{number}"), "b", 0.0)
    assert memory.sticky(TALK, 40.0) is None


def test_a_replica_that_went_is_forgotten() -> None:
    memory = RoutingHistory()
    memory.note_sent(TALK, "a", 0.0)
    memory.forget_others({"b"})
    assert memory.sticky(TALK, 40.0) is None
    assert memory.followed("m", 0.1) is None


def test_a_prompt_is_remembered_where_it_went() -> None:
    memory, pieces = RoutingHistory(), [b"1", b"2"]
    memory.note_sent(RouteRequest("m", "m", pieces=pieces), "a", 0.0)
    assert [memory.seen.share(name, "m", pieces, "", 1.0) for name in "ab"] == [1.0, 0.0]
    memory.forget_others({"b"})
    assert memory.seen.share("a", "m", pieces, "", 1.0) == 0.0


def test_conversation_stays_where_it_was_until_the_engine_there_has_evicted_its_kv() -> None:
    memory, hello = RoutingHistory(), RouteRequest("m", "m", "acme/c-2")
    states = [ReplicaState("a", 1, models=HERE), ReplicaState("b", 0, models=HERE)]

    def first(request: RouteRequest) -> str:
        return rank(request, states, sticky=memory.sticky(request, 40.0))[0]

    memory.note_sent(TALK, "a", 10.0)
    memory.note_sent(hello, "a", 20.0)
    memory.seen.update("a", HERE, {"m": KeptKv(9.0)})
    assert [first(TALK), first(hello)] == ["a", "a"]
    memory.seen.update("a", HERE, {"m": KeptKv(15.0)})
    assert [first(TALK), first(hello)] == ["b", "a"]
    memory.note_sent(TALK, "a", 30.0, 16.0)
    assert first(TALK) == "a"
    memory.note_sent(TALK, "a", 31.0, 14.0)
    assert first(TALK) == "a", "the later time counts"
    memory.note_sent(TALK, "b", 32.0, 14.0)
    memory.seen.update("b", HERE, {"m": KeptKv(15.0)})
    assert memory.sticky(TALK, 40.0) is None, "of another replica, its own"


def test_adapter_slots_hold_the_most_recently_used_adapters() -> None:
    slotted = AdapterSlots()
    for name in ("m:a", "m:b", "m:a", "m:c"):
        slotted.note("m-1", name, 2)
    assert slotted.names({"m-1"}) == ["m:a", "m:c"]
    assert slotted.names({"m-2"}) == []  # another engine, which has begun with none
    assert slotted.names({"m-1"}) == []
