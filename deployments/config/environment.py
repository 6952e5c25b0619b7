"""The variables of the process environment that a person may set for this project.

An empty variable counts as not set. Ray, Serve and the engines read their own variables themselves.
Some of the variables here are read in other places as well: `arbiter.leases` and
`arbiter.server.state_path` run where this package may not be installed, and in commands the import
of pydantic's settings would take a seventh of their time.
"""

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from arbiter.leases import URL


def _cache(folder: str) -> Path:
    return Path.home() / ".cache" / "serve-arbiter" / folder


class Environment(BaseSettings):
    """Read when it is made: `ARBITER_URL`, `ARBITER_KEY`, `ARBITER_MODELS`, `ARBITER_ADAPTERS`,
    `ARBITER_GRAPHS`, `ARBITER_SLABS`, `ARBITER_LOGS`."""

    model_config = SettingsConfigDict(
        env_prefix="ARBITER_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    url: str = URL  # the front that clients talk to
    key: SecretStr | None = None  # API key that clients send; absent: the owner's, to loopback only
    models: Path = Field(default_factory=lambda: _cache("models"))  # made by models/make_models.py
    adapters: Path = Field(default_factory=lambda: _cache("adapters"))  # checked by the engines
    logs: Path = Field(default_factory=lambda: _cache("logs"))  # of `arbiter serve`
    graphs: Path = Field(default_factory=lambda: _cache("graphs"))  # made ready by onnxruntime
    slabs: Path = Field(default_factory=lambda: _cache("slabs"))  # KV that had to leave the RAM
