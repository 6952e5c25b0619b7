"""What an outside process says of its lease, as JSON: checked here, for HTTP and Python alike."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from arbiter.core.types import DeviceBytes, LeaseConditions
from arbiter.protocol.messages import LeaseCall
from arbiter.units import DEFAULT_TENANT, LONGEST_S, Bytes, DeviceId, NodeId, seconds

PID_MOST = 1 << 22  # pid_max of 64-bit Linux (proc(5))


class LeaseBody(BaseModel):
    """Describes the body of `PUT /arbiter/leases/{id}`: repeated in full with each call."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bytes: int = Field(gt=0)
    name: str = Field("", max_length=128)
    term_s: float = Field(3600.0, gt=0, le=LONGEST_S)
    notice_s: float = Field(10.0, ge=0, le=LONGEST_S)
    preemptible: bool = False
    tenant: str = DEFAULT_TENANT
    node: str | None = None
    pid: int | None = Field(None, gt=1, le=PID_MOST)
    devices: dict[str, int] = {}  # as granted, once it is
    deadline_s: float | None = Field(None, gt=0, le=LONGEST_S)
    seen: str = ""  # answered when the state is another one, or after wait_s
    wait_s: float = Field(0.0, ge=0, le=10)

    def as_call(self, lease: str) -> LeaseCall:
        terms = LeaseConditions(
            self.tenant, seconds(self.term_s), seconds(self.notice_s), self.preemptible
        )
        return LeaseCall(
            lease,
            Bytes(self.bytes),
            terms,
            self.name or lease,
            node=None if self.node is None else NodeId(self.node),
            pid=self.pid,
            devices=tuple(
                DeviceBytes(DeviceId(d), Bytes(size)) for d, size in sorted(self.devices.items())
            ),
            deadline=None if self.deadline_s is None else seconds(self.deadline_s),
            seen=self.seen,
            wait=seconds(self.wait_s),
        )


def call_of(lease: str, body: dict[str, Any]) -> LeaseCall:
    """Returns the call that a body describes. Raises pydantic's ValidationError naming the
    field."""
    return LeaseBody.model_validate(body).as_call(lease)
