"""What the clients of a trace are, as models: bytes, seconds to load, seconds in use."""

import random
from dataclasses import dataclass

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.units import GIB, Bytes, DeviceId, Instant, NodeId, Span, seconds
from benchmarks.replay.traces import Arrival

NODE = NodeId("n")
GPU, HOST = DeviceId("n/gpu:0"), DeviceId("n/host")


@dataclass(frozen=True, slots=True)
class Mix:
    """Sizes are drawn from these, one for each client; a load takes start_s + bytes / disk."""

    name: str
    sizes_gib: tuple[float, ...]
    start_s: float  # an engine that starts, before it reads weights
    disk_gib_per_s: float
    host_fraction: float = 0.0  # of all models' bytes: host RAM to sleep in


# bf16 weights plus KV of common open models, 0.5 to 32 billion parameters; NVMe at 3 GB/s.
SERVER = Mix("server", (1.2, 3, 6.5, 8, 15, 16, 27, 28, 48, 65), start_s=6, disk_gib_per_s=3)
# Quantised and small models of all capabilities on a workstation; a SATA disk.
LAPTOP = Mix("laptop", (0.1, 0.3, 0.6, 1.2, 2.4, 4.5, 5, 8), start_s=1, disk_gib_per_s=1)
# Fine-tuned variants of one model: all alike, so only who comes back when matters.
VARIANTS = Mix("variants", (8,), start_s=4, disk_gib_per_s=2)
MIXES = {mix.name: mix for mix in (SERVER, LAPTOP, VARIANTS)}

RUN_MEDIAN_S, RUN_SIGMA = 2.0, 1.0  # an answer's length: lognormal, one in ten above 7 s
ROOM = 1.02  # a budget at least holds the largest model


def demand(arrivals: list[Arrival], mix: Mix, budget_fraction: float, seed: int) -> Demand:
    """One node with one device that lends `budget_fraction` of what all models need together."""
    rng = random.Random(f"{seed}/{mix.name}")
    clients = sorted({client for _, client in arrivals})
    sizes = {client: rng.choice(mix.sizes_gib) for client in clients}
    place = {client: n for n, client in enumerate(clients)}
    total = sum(sizes.values())
    lent = max(total * budget_fraction, max(sizes.values()) * ROOM)
    uses = (
        Use(_instant(at), place[client], seconds(rng.lognormvariate(0, RUN_SIGMA) * RUN_MEDIAN_S))
        for at, client in arrivals
    )
    seats = tuple(_seat(client, sizes[client], mix) for client in clients)
    specs = tuple(types.ModelSpec(seat.model, Span(-1)) for seat in seats)
    table = ev.CapabilitiesSet(
        (types.CapabilitySpec("text", "text", "replay", specs, seconds(300)),)
    )
    return Demand((_node(lent, total * mix.host_fraction),), table, seats, PackedRequests(uses))


def _seat(client: int, size: float, mix: Mix) -> Seat:
    host = size if mix.host_fraction else 0
    need = types.Need(_gib(size), host_bytes=_gib(host))
    return Seat(
        "text",
        f"m{client}",
        NODE,
        need,
        seconds(mix.start_s + size / mix.disk_gib_per_s),
        wake=seconds(0.5 + size / 20),
        sleep=seconds(0.2 + size / 10),
        unload=seconds(0.5),
        priority=types.Priority.BATCH,  # all alike, in use or not: only the policy ranks them
    )


def _node(device: float, host: float) -> ev.NodeSeen:
    specs = (
        types.DeviceSpec(GPU, types.DeviceKind.GPU, _gib(device)),
        types.DeviceSpec(HOST, types.DeviceKind.HOST, _gib(host)),
    )
    return ev.NodeSeen(NODE, specs)


def _gib(size: float) -> Bytes:
    return Bytes(round(size * GIB))


def _instant(at: float) -> Instant:
    return Instant(round(at * 1e9))
