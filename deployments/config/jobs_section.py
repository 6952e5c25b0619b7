"""The `jobs` section of the table: what files, batches and jobs may take."""

from pydantic import Field

from arbiter.units import LONGEST_S
from deployments.config.fields import Size, Strict


class JobsConfig(Strict):
    """Changes of it count from the next start of the jobs' process on."""

    # Calls that are made at once, of batches and of other jobs, each: a fourth of a usual engine's
    # batch, so that chat finds room beside them
    in_flight: int = Field(8, ge=1, le=256)
    turn_s: float = Field(300.0, ge=1, le=LONGEST_S)  # lines of one model, while others wait
    tenant_bytes: Size = 4 << 30  # of one tenant's files
    tenant_files: int = Field(10_000, ge=1)
    # Being read at once: each may take 512 MiB beside the state file before its quota is known
    tenant_uploads: int = Field(4, ge=1, le=64)
    tenant_batches: int = Field(100, ge=1)  # unfinished
    # Finished jobs and stored responses of one tenant; the oldest are forgotten first
    tenant_results: int = Field(10_000, ge=1)
    tenant_result_bytes: Size = 1 << 30
    # What an absent `store` of POST /v1/responses means; OpenAI's is true
    stores_responses: bool = True
    tenant_jobs: int = Field(1_000, ge=1)  # unfinished
    tenant_job_bytes: Size = 1 << 30  # of their requests: 32 of the longest
