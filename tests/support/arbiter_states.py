"""States of an arbiter as `GET /arbiter/state` has them, made from the types of the core."""

import time
from dataclasses import dataclass, field
from typing import Any

from arbiter.core.events import ForeignProcess, SlabReading
from arbiter.core.reports.snapshot import (
    ClientView,
    CooldownView,
    DeviceView,
    FloorView,
    HolderView,
    LoadTimeView,
    QueueView,
    SlabView,
    StateView,
    TicketView,
)
from arbiter.core.types import DeviceBytes, DeviceKind, LeaseConditions
from arbiter.protocol.json_codec import plain
from arbiter.units import (
    MIB,
    Bytes,
    Content,
    DeviceId,
    Epoch,
    HolderId,
    NodeId,
    TicketId,
    seconds,
)

NODE = NodeId("n1")


def size(mib: int) -> Bytes:
    return Bytes(mib * MIB)


@dataclass
class Books:
    """Devices, tickets and the rest; `state` adds the tickets up per device."""

    epoch: int = 1
    sequence: int = 1_000_000
    is_settled: bool = True
    is_closing: bool = False
    budgets: dict[str, int] = field(default_factory=lambda: {"n1/gpu:0": 1_000, "n1/host": 400})
    foreign: dict[str, dict[str, int]] = field(default_factory=dict)  # device to process to MiB
    tickets: dict[str, TicketView] = field(default_factory=dict)
    queue: list[QueueView] = field(default_factory=list)
    cooldowns: list[CooldownView] = field(default_factory=list)
    holders: list[HolderView] = field(default_factory=list)
    floors: list[FloorView] = field(default_factory=list)
    load_times: list[LoadTimeView] = field(default_factory=list)
    slabs: list[SlabView] = field(default_factory=list)
    clients: list[ClientView] = field(default_factory=list)
    pressure: dict[str, str] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)

    def holds(
        self, model: str, mib: int, state: str = "resident", capability: str = "chat", **more: Any
    ) -> str:
        """A ticket that is charged `mib` on the first device, and measured a tenth less."""
        device = DeviceId(more.pop("device", next(iter(self.budgets))))
        inflight, idle_s = more.pop("inflight", 0), more.pop("idle_s", 5.0)
        known = {
            "keep_warm": seconds(300.0), "leaving": None, "pinned": False,
            "charged": (DeviceBytes(device, size(mib)),),
            "measured": (DeviceBytes(device, size(mib * 9 // 10)),),
        }  # fmt: skip
        ticket = TicketId(f"{model}-1")
        self.tickets[ticket] = TicketView(
            ticket, HolderId(f"{capability}#1"), NODE, capability, model, state,
            in_state=seconds(10.0), inflight=inflight,
            idle=seconds(idle_s) if state in ("resident", "asleep") and not inflight else None,
            need_bytes=size(mib), settled_bytes=size(mib), **(known | more),
        )  # fmt: skip
        return ticket

    def leases(self, name: str, mib: int, tenant: str = "acme") -> str:
        terms = LeaseConditions(tenant, seconds(600.0), seconds(5.0), preemptible=True)
        return self.holds(
            name, mib, capability="lease", lease=terms, left=seconds(120.0), tenant=tenant
        )

    def waits(
        self,
        model: str,
        mib: int,
        expected_s: float | None = 4.0,
        left_s: float | None = None,
        waited_s: float = 2.0,
        priority: str = "normal",
    ) -> str:
        nothing: dict[str, Any] = {"charged": (), "measured": ()}
        ticket = self.holds(model, mib, "queued", **nothing)
        self.queue.append(
            QueueView(
                len(self.queue) + 1, TicketId(ticket), "chat", model, seconds(waited_s),
                None if left_s is None else seconds(left_s),
                None if expected_s is None else seconds(expected_s), priority,
            )
        )  # fmt: skip
        return ticket

    def loaded_in(self, model: str, load_s: float, wake_s: float | None = None) -> None:
        wake = None if wake_s is None else seconds(wake_s)
        self.load_times.append(LoadTimeView("chat", model, seconds(load_s), wake))

    def has_adapters(self, model: str, hot: int, images: int) -> None:
        reading = SlabReading(
            "1", Content.ADAPTER, f"chat/{model}", "", None, size(8), size(16), images,
            9, 1, images, 0, 0, hot_count=hot,
        )  # fmt: skip
        self.slabs.append(SlabView(NODE, reading))

    def has_copy(self, model: str, users: tuple[str, ...] = ()) -> None:
        """Of the model's files, which these engines have open."""
        reading = SlabReading(
            "copy-1", Content.WEIGHTS, f"chat/{model}", "c0ffee", None, size(90), size(90), 3,
            2, 0, 3, 0, 0,
        )  # fmt: skip
        self.slabs.append(SlabView(NODE, reading, tuple(map(TicketId, users))))

    def leaves(self, model: str) -> None:
        del self.tickets[TicketId(f"{model}-1")]
        self.queue = [row for row in self.queue if row.model != model]

    def works(self, job: str, done: int, total: int, state: str = "in_progress") -> None:
        """A batch that is so far."""
        self.jobs = [row for row in self.jobs if row["id"] != job]
        self.jobs.append({
            "id": job, "kind": "batch", "tenant": "acme", "state": state, "model": "talk",
            "done": done, "failed": 0, "total": total, "created_s": time.time() - 90,
            "ended_s": None if state == "in_progress" else time.time(),
        })  # fmt: skip

    def state(self, **more: Any) -> dict[str, Any]:
        view = StateView(
            Epoch(self.epoch), self.is_settled, self.is_closing, 0,
            tuple(self._device(DeviceId(name), mib) for name, mib in self.budgets.items()),
            tuple(self.tickets.values()), tuple(self.queue), tuple(self.cooldowns),
            tuple(self.holders), tuple(self.floors), (), tuple(self.clients),
            tuple(self.load_times), tuple(self.slabs),
        )  # fmt: skip
        about = {
            "version": "0.1",
            "protocol": "abc",
            "calls": 0,
            "sequence": self.sequence,
            "jobs": list(self.jobs),
        }
        chosen = {"policy": "cost_aware", "table": {}, "generation": 1}
        return {**about, **plain(view), **chosen, **more}

    def _device(self, device: DeviceId, mib: int) -> DeviceView:
        tickets = self.tickets.values()
        charged = sum(d.size_bytes for t in tickets for d in t.charged if d.device == device)
        measured = sum(d.size_bytes for t in tickets for d in t.measured if d.device == device)
        others = self.foreign.get(device, {})
        foreign = size(sum(others.values()))
        free = Bytes(size(mib) - charged - foreign)
        processes = tuple(
            ForeignProcess(number, name, size(held))
            for number, (name, held) in enumerate(others.items(), 100)
        )
        return DeviceView(
            device, NODE, DeviceKind.HOST if device.endswith("/host") else DeviceKind.GPU,
            size(mib * 5 // 4), size(mib), Bytes(charged), Bytes(measured), foreign, free,
            Bytes(max(0, free)), Bytes(max(0, free)), self.pressure.get(device, "nominal"), True,
            foreign_processes=processes,
        )  # fmt: skip
