"""The Python client: one object with a method for each thing that the system does.

    from deployments.client import AsyncClient, Client, Picture

It speaks to the front over HTTP or by the handle of its deployment; see docs/python.md.
"""

from arbiter.response_errors import ResponseError
from deployments.client.answers import (
    Answer,
    Choice,
    Delta,
    Embeddings,
    Ranked,
    Ranking,
    Span,
    Speech,
    ToolCall,
    Transcript,
    Usage,
)
from deployments.client.arbiter_rows import (
    Device,
    Event,
    HostCopy,
    ModelResidency,
    Plan,
    Status,
    Ticket,
    Waiting,
)
from deployments.client.asynchronous import AsyncClient, AsyncHeld
from deployments.client.batches import AsyncBatch, BatchStatus, Line, LineResult
from deployments.client.jobs import AsyncJob, JobStatus
from deployments.client.media import Audio, Picture
from deployments.client.synchronous import Batch, Client, Held, Job
from deployments.client.typed_errors import FrontUnreachable

__all__ = [
    "Answer",
    "AsyncBatch",
    "AsyncClient",
    "AsyncHeld",
    "AsyncJob",
    "Audio",
    "Batch",
    "BatchStatus",
    "Choice",
    "Client",
    "Delta",
    "Device",
    "Embeddings",
    "Event",
    "FrontUnreachable",
    "Held",
    "HostCopy",
    "Job",
    "JobStatus",
    "Line",
    "LineResult",
    "ModelResidency",
    "Picture",
    "Plan",
    "Ranked",
    "Ranking",
    "ResponseError",
    "Span",
    "Speech",
    "Status",
    "Ticket",
    "ToolCall",
    "Transcript",
    "Usage",
    "Waiting",
]
