"""Which replica gets a request: the one with the model, the adapter, the conversation, or least to
do.
"""

import pytest

from deployments.routing.rank import (
    CONVERSATIONS,
    FOLLOW_S,
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
    offers = [
        ReplicaState("idle"),
        ReplicaState("asleep", 0, models={"m": ModelPresence.ASLEEP}),
        ReplicaState("coming", 9, models={"m": ModelPresence.COMING}),
        ReplicaState("here", 99, models=HERE),
    ]
    assert rank(BASE, offers) == ["here", "coming", "asleep", "idle"]


def test_adapter_slot_ranks_before_conversation_and_conversation_before_queue() -> None:
    law = RouteRequest("m", "m:law", "acme/c-1")
    offers = [ReplicaState("free", 0, models=HERE), ReplicaState("talked", 1, models=HERE),
              ReplicaState("slot", 2, models=HERE, adapters=["m:law"])]  # fmt: skip
    assert rank(law, offers, stuck="talked") == ["slot", "talked", "free"]


def test_base_model_needs_no_adapter_slot() -> None:
    offers = [
        ReplicaState("slot", 1, models=HERE, adapters=["m:law"]),
        ReplicaState("free", 0, models=HERE),
    ]
    assert rank(BASE, offers)[0] == "free"


def test_overload_moves_a_conversation_and_an_adapter_but_loads_no_second_copy() -> None:
    def offers(more: int) -> list[ReplicaState]:
        busy = ReplicaState("busy", more, models=HERE, adapters=["m:law"])
        return [busy, ReplicaState("other", 0, models=HERE), ReplicaState("cold", 0)]

    for wish in (TALK, LAW):
        assert rank(wish, offers(OVERLOAD_COUNT - 1), stuck="busy")[0] == "busy"
        assert rank(wish, offers(OVERLOAD_COUNT), stuck="busy") == ["other", "busy", "cold"]


def test_a_full_replica_is_the_last_to_be_asked() -> None:
    offers = [ReplicaState("full", 8, is_full=True, models=HERE), ReplicaState("cold", 3)]
    assert rank(BASE, offers, stuck="full", sent="full") == ["cold", "full"]


def test_calls_for_a_cold_model_follow_the_first_of_them() -> None:
    memory, offers = RoutingHistory(), [ReplicaState("a", 5), ReplicaState("b", 0)]
    first = rank(BASE, offers, sent=memory.sent("m", 0.0))[0]
    memory.chosen(BASE, first, 0.0)
    assert first == "b"
    busier = [ReplicaState("a", 0), ReplicaState("b", 3)]
    assert rank(BASE, busier, sent=memory.sent("m", FOLLOW_S / 2))[0] == "b"
    assert memory.sent("m", FOLLOW_S) is None  # by then the replica has said what it has
    assert memory.sent("other", 0.0) is None


def test_a_conversation_does_not_leave_the_load_it_waited_for() -> None:
    """Its replica says only within a second that the model is there."""
    offers = [ReplicaState("other", 0, models=HERE), ReplicaState("loaded", 0)]
    assert rank(TALK, offers, stuck="loaded", sent="loaded")[0] == "loaded"
    assert rank(BASE, offers, sent="loaded")[0] == "other"


def test_a_conversation_is_remembered_by_tenant_and_model_and_the_oldest_forgotten() -> None:
    memory = RoutingHistory()
    memory.chosen(TALK, "a", 0.0)
    assert memory.stuck(TALK) == "a"
    assert memory.stuck(RouteRequest("m", "m", "other/c-1")) is None
    assert memory.stuck(RouteRequest("n", "n", "acme/c-1")) is None
    assert memory.stuck(BASE) is None
    for number in range(CONVERSATIONS):
        memory.chosen(RouteRequest("m", "m", f"acme/{number}"), "b", 0.0)
    assert memory.stuck(TALK) is None


def test_a_replica_that_went_is_forgotten() -> None:
    memory = RoutingHistory()
    memory.chosen(TALK, "a", 0.0)
    memory.keep({"b"})
    assert memory.stuck(TALK) is None
    assert memory.sent("m", 0.1) is None


def test_adapter_slots_hold_the_most_recently_used_adapters() -> None:
    slotted = AdapterSlots()
    for name in ("m:a", "m:b", "m:a", "m:c"):
        slotted.note("m-1", name, 2)
    assert slotted.names({"m-1"}) == ["m:a", "m:c"]
    assert slotted.names({"m-2"}) == []  # another engine, which has begun with none
    assert slotted.names({"m-1"}) == []
