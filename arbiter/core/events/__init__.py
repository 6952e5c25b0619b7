"""Names what happened. The shell turns calls, timers and node readings into these events; the core
reads them.

Holders speak of *use*, node agents of *bytes*, and neither speaks of the other.
"""

from arbiter.core.events.holders import (
    BarrierDropped,
    Busy,
    FinishedRequest,
    GaveBack,
    GrowthAsked,
    HeldTicket,
    HolderLost,
    Joined,
    LoadBroke,
    Loaded,
    Prewarmed,
    Released,
    Renewed,
    Requested,
    RequestTimes,
    Slept,
    SpeechStarted,
    Usage,
    Withdrawn,
)
from arbiter.core.events.nodes import (
    ContentReading,
    DeviceReading,
    DeviceUnreadable,
    EngineGone,
    EngineReading,
    ForeignProcess,
    HostCopyReading,
    Measured,
    NodeLost,
    NodeSeen,
    SlabDropped,
    SlabReading,
)
from arbiter.core.events.operators import (
    CancelAsked,
    CapabilitiesSet,
    CapabilityRegistered,
    CapabilityUnregistered,
    CompactAsked,
    FloorSet,
    LoadAsked,
    PressurePushed,
    PriorityRaised,
    TenantRemoved,
    UnloadAsked,
)
from arbiter.core.events.shell import (
    ClosingDown,
    HoursRead,
    HoursReading,
    TimerFired,
)

__all__ = [
    "BarrierDropped",
    "Busy",
    "CancelAsked",
    "CapabilitiesSet",
    "CapabilityRegistered",
    "CapabilityUnregistered",
    "ClosingDown",
    "CompactAsked",
    "ContentReading",
    "DeviceReading",
    "DeviceUnreadable",
    "EngineGone",
    "EngineReading",
    "Event",
    "FinishedRequest",
    "FloorSet",
    "ForeignProcess",
    "GaveBack",
    "GrowthAsked",
    "HeldTicket",
    "HolderLost",
    "HostCopyReading",
    "HoursRead",
    "HoursReading",
    "Joined",
    "LoadAsked",
    "LoadBroke",
    "Loaded",
    "Measured",
    "NodeLost",
    "NodeSeen",
    "PressurePushed",
    "Prewarmed",
    "PriorityRaised",
    "Released",
    "Renewed",
    "RequestTimes",
    "Requested",
    "SlabDropped",
    "SlabReading",
    "Slept",
    "SpeechStarted",
    "TenantRemoved",
    "TimerFired",
    "UnloadAsked",
    "Usage",
    "Withdrawn",
]

Event = (
    CapabilitiesSet
    | CapabilityRegistered
    | CapabilityUnregistered
    | NodeSeen
    | NodeLost
    | Measured
    | EngineGone
    | Joined
    | Renewed
    | HolderLost
    | Requested
    | GrowthAsked
    | GaveBack
    | Withdrawn
    | Loaded
    | LoadBroke
    | Busy
    | BarrierDropped
    | Slept
    | Released
    | Prewarmed
    | SpeechStarted
    | UnloadAsked
    | PriorityRaised
    | CancelAsked
    | FloorSet
    | LoadAsked
    | CompactAsked
    | PressurePushed
    | TenantRemoved
    | HoursRead
    | ClosingDown
    | TimerFired
)
