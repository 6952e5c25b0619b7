"""The `arbiter` section of the table: what a person may set of its rules."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from arbiter.core import settings as core
from arbiter.core.view import NamedRole, PressureMarks, Role
from arbiter.opening_hours import parse
from arbiter.units import LONGEST_S, Bytes, seconds
from deployments.config.fields import Hours, KvTerm, Size, Strict, Zone
from deployments.config.outside_policies import imported
from policies import ADMIT, EVICT, REPLAY_ONLY, ROLES


class Arenas(Strict):
    """The most of each kind of device that may be lent, before the wiggle room is taken off.
    Absent: nine tenths of what the device has."""

    gpu: Size | None = None
    cpu: Size | None = None
    host: Size | None = None

    def as_arenas(self) -> core.Arenas:
        caps = (None if cap is None else Bytes(cap) for cap in (self.gpu, self.cpu, self.host))
        return core.Arenas(*caps)


class TenantConfig(Strict):
    """What one tenant may have of the devices that compute (C10). Tenants are those of API
    keys; `default` is everybody without one."""

    maximum: Size | None = None  # at once, over all devices
    reserved: Size = 0  # of each device, kept from other tenants
    average: Size | None = None  # over an hour; beyond it nothing new is loaded for it for a while
    share: float = Field(1.0, gt=0, le=1_000)  # of its turns in the queue, beside other tenants
    longest_kv_term: KvTerm = "extended"  # G4: for which its KV stays after a use, at most
    # E6: the part of the rows of each slab that its requests may fill, of models loaded from now on
    slab: float = Field(1.0, ge=0, le=1)

    @field_validator("reserved")
    @classmethod
    def _within(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("maximum")
        if most is not None and value > most:
            raise ValueError(f"{value} bytes are more than its maximum, {most}")
        return value

    def as_terms(self, tenant: str) -> core.TenantLimits:
        most, average = (None if n is None else Bytes(n) for n in (self.maximum, self.average))
        return core.TenantLimits(tenant, most, Bytes(self.reserved), average, self.share)


class RoleConfig(Strict):
    """One kind of work (C1), new or in place of a role of policies/roles.py."""

    rank: int = Field(ge=0, le=1_000)  # lowest is evicted first; text is 100
    act: str = Field(min_length=1, max_length=120)  # what evicting it means, said with each
    keep_warm_s: float = Field(300.0, ge=-1, le=LONGEST_S)
    spared: bool = False  # C5: memory pressure never evicts it
    # Seconds beside those of the reload; for policies that price by cost.
    evict_cost_s: float = Field(0.0, ge=0, le=LONGEST_S)

    def as_role(self, name: str) -> NamedRole:
        role = Role(self.rank, self.act, self.keep_warm_s, self.spared, self.evict_cost_s)
        return NamedRole(name, role)


class MarksConfig(Strict):
    """Shares of a budget: above `high` what can go goes, until `low` (C4). 1.0 is never
    exceeded, so it switches them off."""

    high: float = Field(0.90, gt=0, le=1)
    low: float = Field(0.80, ge=0, le=1, validate_default=True)  # also where only `high` is given

    @field_validator("low")
    @classmethod
    def _below(cls, value: float, info: ValidationInfo) -> float:
        high = info.data.get("high")
        if high is not None and value > high:
            raise ValueError(f"low, {value}, is above high, {high}")
        return value

    def as_marks(self) -> core.Watermarks:
        return core.Watermarks(self.high, self.low)


class ShortageConfig(Strict):
    """Below `low` of its memory a device is short, below `critical` nearly out of it."""

    low: float = Field(ge=0, le=1)
    critical: float = Field(ge=0, le=1)

    @field_validator("critical")
    @classmethod
    def _below(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and value > low:
            raise ValueError(f"critical, {value}, is above low, {low}")
        return value


class StallConfig(Strict):
    """The shares of the last ten seconds in which some task waited for memory, from which on memory
    counts as short."""

    low: float = Field(gt=0, le=1)
    critical: float = Field(gt=0, le=1)

    @field_validator("critical")
    @classmethod
    def _above(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and value < low:
            raise ValueError(f"critical, {value}, is below low, {low}")
        return value


class PressureConfig(Strict):
    """Fractions at which real memory counts as low or critical (C5)."""

    ram: ShortageConfig = ShortageConfig(low=0.15, critical=0.05)  # available, of all host RAM
    gpu: ShortageConfig = ShortageConfig(low=0.5, critical=0.2)  # free, of what is not lent
    stalls: StallConfig = StallConfig(low=0.06, critical=0.6)  # of the last ten seconds

    def as_marks(self) -> PressureMarks:
        return PressureMarks(
            self.ram.low,
            self.ram.critical,
            self.gpu.low,
            self.gpu.critical,
            self.stalls.low,
            self.stalls.critical,
        )


def _policy(what: str, name: str, usable: list[str]) -> str:
    """Raises ValueError unless the name is usable, or the path to a function."""
    if ":" in name:
        imported(name)
    elif name not in usable:
        raise ValueError(f"no {what} {name!r}; there is: {', '.join(usable)}, or `module:function`")
    return name


def in_zone(hours: str, zone: str) -> str:
    """Returns hours with the zone of the table, unless they name one."""
    if not hours or parse(hours).zone:
        return hours
    return f"{hours} {zone}".rstrip()


class ArbiterConfig(Strict):
    """The section `arbiter` of the table: policies, shares of memory, bounds and times. Names that
    end in `_s` are seconds; sizes are bytes, or texts such as `8 GiB`."""

    evict: str = "learned"
    admit: str = "fair_share"
    roles: dict[str, RoleConfig] = Field({})  # C1
    one_resident_roles: tuple[str, ...] = ()  # A11: of these roles one model a node
    bypass_count: int = Field(8, ge=0)  # C6: how often a ticket may be bypassed
    bypass_s: float = Field(30.0, ge=0, le=LONGEST_S)  # and for how long
    arenas: Arenas = Arenas()
    # B2: shares of a device, of its arena, and of its arena again; and B3's margin of a GPU. `pool`
    # is a share of the arena, and not the pool of slabs (`host_pool`).
    arena: float = Field(0.9, gt=0, le=1)  # lent at most, where `arenas` names no size
    wiggle: float = Field(0.1, ge=0, lt=1)  # kept for what estimates miss
    pool: float = Field(1.0, gt=0, le=1)  # that tickets may hold at most
    gpu_margin: Size = 512 << 20  # for context and driver
    state_file: str | None = None  # default: beside the user's other state, mode 0600
    event_file: str | None = None  # the event log as JSON lines; default: none is written
    barrier_s: float = Field(10.0, gt=0, le=600)  # A9
    load_timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    queue_per_model: int = Field(1_000, ge=1)
    queue_total: int = Field(10_000, ge=1)
    min_residency_loads: float = Field(1.0, ge=0)  # in units of the model's own load time
    # C13: a model whose place another one wants back goes on with its requests for so long; 0: off
    collate_s: float = Field(30.0, ge=0, le=600)
    loading_most: float = Field(0.3, gt=0, le=1)  # of ten minutes; above it models stay longer
    # C13: `22-07`, or a list: at other times batch requests wait, unless their model is resident
    batch_hours: Hours = ""
    time_zone: Zone = ""  # of all hours, as `Europe/Berlin`; absent: the arbiter's machine's
    host_marks: MarksConfig = MarksConfig()  # C4: of host RAM that asleep models may fill
    device_marks: MarksConfig | None = None  # of a device while a ticket is queued; absent: off
    pressure_marks: PressureConfig = PressureConfig()  # C5: of physical memory
    # C11: `declared` brings in the next of a pipeline, `history` also what usually followed
    preload: Literal["off", "declared", "history"] = "declared"
    pipelines: list[list[str]] = Field([])  # of capabilities, in the order they are used
    # D7: idle models that hold so much more than they need are freed and loaded again when a ticket
    # would fit then, on `arbiter compact`, and after so many loads of a device (0: no schedule)
    compact_least: Size = 64 << 20
    compact_every_loads: int = Field(0, ge=0)
    pinned_most: float = Field(1.0, ge=0, le=1)  # C8: share of a device that may be pinned
    lease_tenant: Size | None = None  # the most one tenant may lease; default: half of all
    lease_term_most_s: float = Field(86_400.0, gt=0, le=LONGEST_S)  # A15
    # E1: host RAM of a node for what engines leave behind; default: a tenth of it; 0: nothing stays
    host_pool: Size | None = None
    # G4: on the disk of a node, for KV blocks that must leave the pool before they expire, in
    # `slabs` beside the state file, else ~/.cache/serve-arbiter/slabs (or ARBITER_SLABS); default:
    # 8 GiB, or a tenth of what the disk has free if that is less; 0: none is written
    disk_pool: Size | None = None
    # G4: between two looks of a node for slabs and files in which everything has expired
    pool_sweep_s: float = Field(300.0, ge=60, le=LONGEST_S)
    # K2: between two replays of the last day for the metrics, each some seconds of a processor at
    # the lowest priority; 0: none
    replay_s: float = Field(1_800.0, ge=0, le=LONGEST_S)
    # N3: idle Ray workers kept on each node, 77 MB each, so that replicas start at once
    spare_workers: int = Field(1, ge=0, le=64)
    tenants: dict[str, TenantConfig] = Field({})  # C10

    @field_validator("evict")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        return _policy("eviction policy", value, sorted(EVICT.keys() - REPLAY_ONLY))

    @field_validator("admit")
    @classmethod
    def _known_order(cls, value: str) -> str:
        return _policy("grant order", value, sorted(ADMIT))

    @field_validator("one_resident_roles")
    @classmethod
    def _known_roles(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        roles = ROLES.keys() | info.data.get("roles", {}).keys()
        if unknown := [role for role in value if role not in roles]:
            raise ValueError(f"no role {unknown[0]!r}; there is: {', '.join(sorted(roles))}")
        return value

    def keep_warm_s_of(self, role: str) -> float | None:
        """Seconds for which models of a role stay warm unused; None: there is no such role."""
        if own := self.roles.get(role):
            return own.keep_warm_s
        return ROLES[role].keep_warm_s if role in ROLES else None

    def as_settings(self) -> core.Settings:
        """The same as the core's settings, in which times are Spans and sizes Bytes."""
        return core.Settings(
            evict=self.evict,
            arenas=self.arenas.as_arenas(),
            arena_fraction=self.arena,
            wiggle_fraction=self.wiggle,
            pool_fraction=self.pool,
            gpu_margin_bytes=Bytes(self.gpu_margin),
            admit=self.admit,
            roles=tuple(role.as_role(name) for name, role in sorted(self.roles.items())),
            one_resident_roles=frozenset(self.one_resident_roles),
            bypass_count=self.bypass_count,
            timeouts=core.Timeouts(
                barrier=seconds(self.barrier_s),
                refusal=min(seconds(self.barrier_s), core.Timeouts().refusal),
                load=seconds(self.load_timeout_s),
                bypass=seconds(self.bypass_s),
            ),
            queue_per_model_count=self.queue_per_model,
            queue_total_count=self.queue_total,
            min_residency_loads=self.min_residency_loads,
            collate_most=seconds(self.collate_s),
            loading_most_fraction=self.loading_most,
            batch_hours=in_zone(self.batch_hours, self.time_zone),
            host_marks=self.host_marks.as_marks(),
            device_marks=self.device_marks.as_marks() if self.device_marks else None,
            pressure_marks=self.pressure_marks.as_marks(),
            preload=self.preload,
            pipelines=tuple(tuple(pipeline) for pipeline in self.pipelines),
            compact_least_bytes=Bytes(self.compact_least),
            compact_every_loads_count=self.compact_every_loads,
            pinned_most_fraction=self.pinned_most,
            lease_tenant_bytes=None if self.lease_tenant is None else Bytes(self.lease_tenant),
            lease_term_most=seconds(self.lease_term_most_s),
            tenants=tuple(t.as_terms(name) for name, t in sorted(self.tenants.items())),
        )
