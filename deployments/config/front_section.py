"""The `front` section of the table: bounds, keys, hosts, and the profiles of clients."""

from typing import Annotated, Any, Literal

from pydantic import Field

from arbiter.units import LONGEST_S
from deployments.config.fields import Size, Strict


class Profile(Strict):
    """Defaults for clients that name the profile in `x_client_id`."""

    aliases: dict[str, str] = Field({})  # names they use to names that are served
    defaults: dict[str, Any] = Field({})  # request fields, before those of the model
    priority: Literal["urgent", "high", "normal", "low", "batch"] | None = None
    deadline_s: float | None = Field(None, gt=0, le=LONGEST_S)
    stay_warm_s: float = Field(0.0, ge=0, le=3_600)
    local_only: bool = False  # its requests never go to a remote (J5)


class FrontConfig(Strict):
    profiles: dict[str, Profile] = Field({})
    # For a client that streams and waits for a load: seconds before the first progress comment,
    # and between two. A refusal after a comment has the status 200.
    progress_s: float = Field(1.0, gt=0, le=60)
    # Requests in flight over all models; each costs the front some 50 kB, and beyond them a client
    # does better to retry. A capability's replica takes 256 and lets 512 wait.
    in_flight: int = Field(1_000, ge=1, le=1_000)
    # Of these, those of one tenant where several tenants have keys; absent: half of them, so that
    # no tenant alone fills the front.
    tenant_in_flight: int | None = Field(None, ge=1, le=1_000)
    # Of a request's body: seconds until its next piece comes, and until it is whole. The longest is
    # 32 MiB, which takes 270 s at 1 Mbit/s; an upload to /v1/files has an hour.
    body_piece_s: float = Field(20.0, gt=0, le=600)
    body_s: float = Field(300.0, gt=0, le=3_600)
    # Of the bodies of all requests in flight, which the front keeps until they are answered: 1 MiB
    # for each of 1,000, or 32 of the longest. Bodies of up to 64 KiB are taken beyond it.
    bodies_bytes: Annotated[Size, Field(ge=32 << 20)] = 1 << 30
    keys_file: str | None = None  # API keys, mode 0600; default: beside the arbiter's state
    hosts: tuple[str, ...] = ()  # names this front is called by, besides addresses and localhost
    # Other sites, as `https://name:port`, whose pages may call it and read the answers: with a key
    # what it allows, and before there are keys whatever is open.
    origins: tuple[str, ...] = ()

    @property
    def most_of_tenant(self) -> int:
        """Requests in flight of one tenant among several."""
        return self.tenant_in_flight or max(1, self.in_flight // 2)
