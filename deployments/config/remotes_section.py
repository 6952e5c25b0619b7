"""The `remotes` section of the table: OpenAI-compatible endpoints on other machines (J5).

The operator writes it and no request adds to it. It names where a key is, and never the key.
"""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from arbiter.units import LONGEST_S
from deployments.config.fields import Size, Strict

Input = Literal["text", "image", "audio"]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

# Remotes are labels of metrics; their models' own names go into a header of each answer.
_REMOTE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|[0-9a-f:]{2,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
OUR_KEY = "ARBITER_KEY"  # opens this system, so it never travels

MILLION = 1_000_000


class BudgetConfig(Strict):
    """The most that one tenant may spend at a remote in a day of UTC."""

    tokens: int | None = Field(None, ge=0)
    money: float | None = Field(None, ge=0, le=1e9)  # in the currency of the prices

    @model_validator(mode="after")
    def _is_bound(self) -> "BudgetConfig":
        if self.tokens is None and self.money is None:
            raise ValueError("a budget has `tokens`, `money` or both; 0 allows nothing")
        return self

    @property
    def micros(self) -> int | None:
        """Money in millionths."""
        return None if self.money is None else round(self.money * MILLION)


class RemoteModel(Strict):
    """One model of a remote, under the name that requests here use for it."""

    name: str  # at the remote
    paths: tuple[Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"], ...] = Field(
        ("/v1/chat/completions",), min_length=1
    )
    inputs: tuple[Input, ...] = Field(("text",), min_length=1)  # what may leave for it
    prompt_price: float = Field(0.0, ge=0, le=1e6)  # of a million tokens
    answer_price: float = Field(0.0, ge=0, le=1e6)
    answer_tokens: int = Field(4_096, ge=1, le=MILLION)  # the most of one answer, and the default
    context_tokens: int | None = Field(None, ge=1)  # shown in its card
    # Newer models of OpenAI refuse `max_tokens`; most other servers know nothing else
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    first_token_s: float = Field(1.0, gt=0, le=LONGEST_S)  # expected, until answers were seen
    tokens_per_s: float = Field(50.0, gt=0)

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _OWN_NAME.fullmatch(value):
            raise ValueError(f"model name {value!r}: use letters, digits, and . _ : / @ + - inside")
        return value

    def micros(self, prompt_tokens: int, answer_tokens: int) -> int:
        """The price, in millionths of the currency."""
        return round(prompt_tokens * self.prompt_price + answer_tokens * self.answer_price)


class RemoteBounds(Strict):
    """What a remote may take of this machine's time and memory. Defaults: a long answer of a slow
    model; OpenAI's client waits 600 s in all as well."""

    connect_s: float = Field(10.0, gt=0, le=600)
    head_s: float = Field(60.0, gt=0, le=3_600)  # from the request to the answer's head
    idle_s: float = Field(30.0, gt=0, le=3_600)  # between two pieces of an answer
    total_s: float = Field(600.0, gt=0, le=86_400)
    request_bytes: Size = 4 << 20
    answer_bytes: Size = 32 << 20
    in_flight: int = Field(16, ge=1, le=1_000)


class RemoteConfig(Strict):
    """One row of `remotes`: the endpoint, its key, its models, and each tenant's budget of a day.
    The bounds beside them are in seconds and bytes. docs/remotes.md explains each field."""

    url: str  # up to and with `/v1`
    models: dict[str, RemoteModel] = Field(min_length=1)
    budget: BudgetConfig  # of each tenant and day
    tenants: dict[str, BudgetConfig] = Field({})  # in its place, for these
    key_env: str | None = None  # a variable in the environment of the front
    key_file: str | None = None  # of mode 0600; read for each request
    # Private and loopback addresses too. Link-local ones, where clouds keep credentials, never
    private_addresses: bool = False
    ca_file: str | None = None  # certificate authorities in place of the system's
    bounds: RemoteBounds = RemoteBounds()

    @field_validator("key_env")
    @classmethod
    def _not_ours(cls, value: str | None) -> str | None:
        if value is not None and (value == OUR_KEY or not _VARIABLE.fullmatch(value)):
            raise ValueError(f"{value!r}: name a variable of its own, which holds the remote's key")
        return value

    @model_validator(mode="after")
    def _plain_url(self) -> "RemoteConfig":
        parts = urlsplit(self.url)
        if parts.username or parts.password or parts.query or parts.fragment or not self.host:
            raise ValueError("url: write it as `https://api.example.com/v1`")
        if not _HOST.fullmatch(self.host) or not re.fullmatch(r"(/[\w.~-]+)*/?", parts.path):
            raise ValueError("url: write it as `https://api.example.com/v1`, in small letters")
        if parts.scheme != "https" and not (parts.scheme == "http" and self.private_addresses):
            raise ValueError("url: https; http only with `private_addresses: true`")
        if self.key_env and self.key_file:
            raise ValueError("`key_env` or `key_file`, not both")
        return self

    @property
    def host(self) -> str:
        """The host as in the URL, without the port. Empty where there is none."""
        return urlsplit(self.url).hostname or ""

    def endpoint(self, path: str) -> str:
        """The URL for one of the paths of `/v1`."""
        return self.url.rstrip("/") + path.removeprefix("/v1")

    def budget_of(self, tenant: str) -> BudgetConfig:
        return self.tenants.get(tenant, self.budget)


class RemotesConfig(Strict):
    """The remotes of the table; without rows there are none."""

    nothing_leaves: bool = False  # the one switch: no remote is asked, whatever the rows say
    hosts: tuple[str, ...] = ()  # that the URLs of the rows may name
    secrets: tuple[str, ...] = ()  # further patterns; a request in which one is found stays here
    rows: dict[str, RemoteConfig] = Field({})

    @field_validator("secrets")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        import regex

        for pattern in value:
            try:
                expression = regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"pattern {pattern!r}: {error}") from None
            if expression.match(""):
                raise ValueError(f"pattern {pattern!r} finds a secret in an empty text")
        return value

    @model_validator(mode="after")
    def _listed_hosts(self) -> "RemotesConfig":
        for name, row in self.rows.items():
            if not _REMOTE.fullmatch(name):
                raise ValueError(f"remote {name!r}: use small letters, digits and - inside")
            if row.host not in self.hosts:
                raise ValueError(f"rows.{name}.url: {row.host!r} is not in `remotes.hosts`")
        return self

    @model_validator(mode="after")
    def _one_remote_per_model(self) -> "RemotesConfig":
        homes: dict[str, str] = {}
        for name, row in self.rows.items():
            for model in row.models:
                if (other := homes.setdefault(model, name)) != name:
                    raise ValueError(f"model {model!r} is in both {other!r} and {name!r}")
        return self

    @property
    def homes(self) -> dict[str, str]:
        """Model name to the remote's name."""
        return {model: name for name, row in self.rows.items() for model in row.models}
