"""Every limit, time and share the arbiter's rules use, each with its source beside it.

`Settings` is plain data: it pickles, compares, and comes out of serve_config.yaml through
deployments/config/arbiter_section.py. Limits of data structures stand beside them, with their
reason.
"""

from dataclasses import dataclass, field

from arbiter.core.types import DeviceKind
from arbiter.core.view import NamedRole, PressureMarks
from arbiter.units import MIB, MILLISECOND, SECOND, Bytes, Span, seconds


@dataclass(frozen=True, slots=True)
class Arenas:
    """Caps how much of each kind of device may be lent. None: `Settings.arena_fraction` of it."""

    gpu_bytes: Bytes | None = None
    cpu_bytes: Bytes | None = None
    host_bytes: Bytes | None = None

    def cap(self, kind: DeviceKind) -> Bytes | None:
        """Returns the cap for a kind of device, if it has one."""
        caps = {
            DeviceKind.GPU: self.gpu_bytes,
            DeviceKind.CPU: self.cpu_bytes,
            DeviceKind.HOST: self.host_bytes,
        }
        return caps[kind]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits every wait in the core."""

    # What holders do.
    barrier: Span = seconds(10)  # A9: then the old model goes on and the next is tried
    answer: Span = seconds(2)  # past a deadline: two heartbeats, so one may be lost
    unload: Span = seconds(30)  # nothing in flight: 80 GB to host RAM at 5 GB/s is 16 s, doubled
    load: Span = seconds(600)  # ollama gives up after 5 min; a hub-size model from a slow disk, 2x
    refusal: Span = seconds(10)  # a victim that refused is left alone, as long as a barrier lasts
    silent: Span = seconds(10)  # A5: ten heartbeats missed; of a driver, silence is death
    lost: Span = seconds(60)  # a replica's; Ray tells of nearly all deaths in 2 s
    lease_lapse: Span = seconds(10)  # A5, A15: a lease without heartbeats is over
    unconfirmed: Span = seconds(5)  # a heartbeat sent before a grant arrived cannot deny it

    # What nodes do.
    rejoin: Span = seconds(5)  # A18: grants nothing before, unless every holder is back
    reap_every: Span = Span(250 * MILLISECOND)  # A10
    reclaim_overdue: Span = seconds(5)  # A10: then an event, and the holder is quarantined
    # D1: bytes fall before the holder says that it sleeps; readings come each second.
    sleep_without_fall: Span = Span(1500 * MILLISECOND)
    reading: Span = seconds(5)  # agents send a reading each second; five missed: not readable

    # What the arbiter does.
    bypass: Span = seconds(30)  # C6: a ticket is bypassed no longer than this
    cooldown_first: Span = seconds(2)  # doubles with each failure in a row
    cooldown_most: Span = seconds(300)  # Kubernetes caps CrashLoopBackOff at five minutes
    retry: Span = seconds(5)  # a holder asks again at once after a failure for memory
    closing: Span = seconds(30)  # Kubernetes' default grace period before it kills
    pressure_tick: Span = seconds(5)  # C5: while it lasts, another one goes
    audit: Span = Span(10 * SECOND)  # all books are checked this often, touched ones at once


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Says what one tenant may have of the devices that compute, and what is kept for it (C10)."""

    tenant: str
    most_bytes: Bytes | None = None  # at once, over all of them
    reserved_bytes: Bytes = Bytes(0)  # on each of them, for no other tenant
    average_bytes: Bytes | None = None  # over `quota_window`; beyond it, it cools down
    share_fraction: float = 1.0  # of its turns in the queue, beside others' (C10: fair share)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Gives the fractions of a budget between which a rule switches: above the high one idle models
    leave, down to the low one (C4)."""

    high_fraction: float = 0.90
    low_fraction: float = 0.80


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds what a person may set, and what follows from the specification."""

    evict: str = "learned"  # names in policies.EVICT, ADMIT, PLACE, KEEP_WARM, PRESSURE
    admit: str = "fair_share"
    place: str = "best_fit"
    keep_warm: str = "since_last_use"
    pressure: str = "physical"
    preload: str = "declared"  # C11: off, declared (pipelines), history (both)
    pipelines: tuple[tuple[str, ...], ...] = ()  # capabilities, in the order they are used
    arenas: Arenas = Arenas()
    timeouts: Timeouts = field(default_factory=Timeouts)

    arena_fraction: float = 0.9  # B2: of the device, the rest is the system's
    wiggle_fraction: float = 0.1  # B2: of the arena, for what estimates miss
    pool_fraction: float = 1.0  # B2: of the arena, for tickets; not the slabs' pool
    gpu_margin_bytes: Bytes = Bytes(512 * MIB)  # B3: context and driver, GPUs only

    # C6: how often a ticket is bypassed at most; 0: never, which costs a walk of the queue.
    bypass_count: int = 8
    roles: tuple[NamedRole, ...] = ()  # C1: beside those of policies/roles.py
    one_resident_roles: frozenset[str] = frozenset()  # A11: exclusion groups; by default none

    queue_per_model_count: int = 1_000  # C7; a waiter is ~1 kB, so 1 MB a model
    queue_total_count: int = 10_000  # C7; one look at as many on one node is ~5 ms
    remembered_count: int = 4_096  # answers kept to repeat: a minute at 60 refusals a second

    host_marks: Watermarks = Watermarks()
    device_marks: Watermarks | None = None  # off: an idle model costs nothing until a ticket waits
    pressure_marks: PressureMarks = field(default_factory=PressureMarks)
    min_residency_loads: float = 1.0  # C4: at least as long as bringing it in took
    min_residency: Span = seconds(1)  # where nothing is known of its load: one heartbeat
    # Both tuned on half of the public traces (docs/adr/0007): half an hour is noise at a request
    # every few minutes, four hours is late when a client leaves; a day carries the daily swing.
    rate_window: Span = seconds(5400)
    lasting_window: Span = seconds(86_400)
    carry_most: Span = seconds(900)  # C2, C8: the longest keep-warm of any role
    # C13: so long a model whose place another one wants back goes on with requests of its own, as
    # long as a ticket is bypassed. 0: it leaves when its minimum residency is over.
    collate_most: Span = seconds(30)
    # Such a model has no more requests of its own once it was idle for as long as its load took,
    # because whether to wait on or to swap is ski rental: for one heartbeat at least, and at most
    # for as long as its user is likely to pause.
    collate_pause: Span = seconds(1)
    collate_pause_most: Span = seconds(5)
    loading_most_fraction: float = 0.3  # C13: of ten minutes; above it models stay longer
    batch_hours: str = ""  # C13: of batch work, where its model has none; empty: all day
    min_residency_most: Span = seconds(60)  # a slow loader may not block others for minutes

    lease_term_most: Span = seconds(86_400)  # A15; batch clusters cap a job at a day
    lease_notice_most: Span = seconds(120)  # cloud spot machines give 30 s to 2 min
    lease_tenant_bytes: Bytes | None = None  # A15: the most one tenant may lease; None: a fraction
    lease_tenant_fraction: float = 0.5  # of all that can be lent: half is left for everyone else

    tenants: tuple[TenantLimits, ...] = ()  # C10; of others nothing is limited
    quota_window: Span = seconds(3600)  # their averages: clouds bill by the hour
    accounts_most_count: int = 1_024  # clients told apart; 100 kB, saved in a millisecond

    # D7: a reload takes seconds, in which a small engine of the default allocates as much anew.
    compact_least_bytes: Bytes = Bytes(64 * MIB)
    compact_every_loads_count: int = 0  # of a device; 0: no schedule

    pinned_most_fraction: float = 1.0  # C8: of a budget; all of it unless the table says less

    follow_within: Span = seconds(60)  # C11: a use after that long follows nothing
    habit_least_count: int = 3  # seen as often as this before it is a habit, not a coincidence
    habit_fraction: float = 0.5  # and at least every second time
    prefetch_for: Span = seconds(60)  # a load without a request has ended by then

    slept_fraction: float = 0.9  # D1: of the ticket's device bytes must be seen to fall
    finish_fraction: float = 0.2  # A8: an abandoned load with at most this left goes on
    oom_growth_fraction: float = 0.25  # attempt 2 asks this much more; retried once only
    learned_headroom_fraction: float = 0.05  # so that measured <= declared <= measured + 5 %
    load_ewma_fraction: float = 0.3  # weight of the newest load; three loads forget half


DEFAULTS = Settings()
