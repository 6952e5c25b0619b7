"""The `models` of a capability in the table: their files, arguments, footprints and adapters."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from arbiter.core import types
from arbiter.units import DEFAULT_TENANT, LONGEST_S, Bytes
from deployments.config.fields import Hours, KvTerm, Size, Strict, parse_size
from deployments.config.url_allowlist import is_prefix

# Names end up in URLs, file names and metric labels; `:` separates a base from its adapter.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

MAX_PREFIXES = 32  # of one model; each is a request of one token, sent to an idle engine

ESPEAK = "espeak-ng"  # as the source of a model: espeak-ng's own voices, which need no file


class NeedConfig(Strict):
    """Explicit footprint of a model. Absent parts are estimated from its files."""

    weights: Size
    working: Size = 0
    scratch: Size = 0
    context: Size = 0
    host: Size | None = None  # asleep; absent: as much as the weights

    def as_need(self) -> types.Need:
        return types.Need(
            weights_bytes=Bytes(self.weights),
            working_bytes=Bytes(self.working),
            scratch_bytes=Bytes(self.scratch),
            context_bytes=Bytes(self.context),
            host_bytes=Bytes(self.weights if self.host is None else self.host),
        )


class DispatchConfig(Strict):
    """Models of one lock compute one at a time on a node, and share one reserve of scratch."""

    lock: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")  # a file's name in the node's own folder
    scratch: Size  # at most, while it computes: `python -m benchmarks.scratch` measures it


class MergeConfig(Strict):
    """When an adapter is merged into a copy of its base, for which there must be free memory (F7).
    It stays until it is idle for the model's keep-warm time, or has less than half of the share."""

    share: float = Field(0.9, ge=0.5, le=1)  # of the last requests for the model on one replica
    requests: int = Field(200, ge=1, le=10_000)


class AdaptersConfig(Strict):
    """LoRA adapters of a text model, by name from a folder that may change while it is served
    (deployments/adapters/catalogue.py has its layout)."""

    folder: str
    max_rank: Literal[8, 16, 32, 64, 128, 256] = 16
    slots: int | None = Field(None, ge=1)  # adapters in one batch; absent: from the next line
    slot_share: float = Field(0.25, gt=0, le=4)  # of the weights' bytes, spent on slots
    wait_s: float = Field(30.0, gt=0, le=600)  # for a slot, when others hold them all
    # Where those in `remote.json` may come from, as `s3://bucket/loras/`: whole folders
    urls: tuple[str, ...] = ()
    rebalance_s: float = Field(60.0, gt=0, le=3_600)  # between two rebalances of slots and images
    merge: MergeConfig | None = None  # absent: none is merged

    @field_validator("urls")
    @classmethod
    def _whole_folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [url for url in value if not is_prefix(url)]:
            raise ValueError(f"{bad[0]!r}: write a folder, as `s3://bucket/loras/`")
        return value


class StablePrefixConfig(Strict):
    """What many conversations with a model begin with: warmed ahead of them (G1)."""

    system: str | None = None  # short for a first message of that role
    messages: list[dict[str, Any]] = Field([], max_length=64)
    tools: list[dict[str, Any]] = Field([], max_length=128)
    adapter: str | None = None  # absent: the model itself
    tenant: str = DEFAULT_TENANT  # whose requests it is for: KV never crosses tenants

    @model_validator(mode="after")
    def _not_empty(self) -> "StablePrefixConfig":
        if not (self.system or self.messages or self.tools):
            raise ValueError("a stable prefix has `system`, `messages` or `tools`")
        return self

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Its messages, as a request has them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages


class DrafterConfig(Strict):
    """Another model of the capability that proposes tokens, in the same engine: several are then
    checked in one step (A13). Both must have the same vocabulary."""

    model: str
    tokens: int = Field(3, ge=1, le=16)  # proposed at a time; few survive beyond that


class ModelConfig(Strict):
    """One model of a capability: its files, its engine's arguments, and how long it stays. Names
    that end in `_s` are seconds; sizes are bytes, or texts such as `8 GiB`."""

    source: str  # `made:NAME` (models/make_models.py), `package:NAME`, a folder, or a hub id
    engine_args: dict[str, Any] = Field({})
    # A14: arguments that take the place of these while it is grown, which it is when a request
    # needs more than it has. Its engine is started anew for that, and idle models make room.
    grow_to: dict[str, Any] = Field({})
    # Gives back what it grew by after so long without a request; the restart takes a second or
    # more, in which the model serves no request
    stays_grown_s: float = Field(60.0, gt=0, le=LONGEST_S)
    chat_template: str | None = None  # a Jinja file or the template itself; default: the model's
    thinking: bool | None = None  # `enable_thinking` of its template where a request says nothing
    defaults: dict[str, Any] = Field({})  # request fields where a request says nothing
    need: NeedConfig | None = None
    keep_warm_s: float | None = Field(None, ge=-1, le=LONGEST_S)  # -1: for ever; 0: goes at once
    pin: bool = False
    # D1: how far it may fall: `device` (loaded at start, never a victim), `host` (asleep at least)
    floor: Literal["cold", "host", "device"] = "cold"
    # C13: `22-07`, or a list: at other times it is not loaded, and leaves once it is idle
    hours: Hours = ""
    batch_hours: Hours = ""  # at other times its batch requests wait; absent: the arbiter's
    allow_oversize: bool = False  # loads even where it is larger than the whole budget (B6)
    can_sleep: bool = True
    # D4: `shared`: one copy of its files in host RAM for all engines of a node that load the same
    # bytes; asleep they need no other. `group`: processes of our group may open it as well
    host_copy: Literal["private", "shared", "group"] = "private"
    # What its conversations begin with, warmed at its load and again while it is resident (G1)
    stable_prefixes: list[StablePrefixConfig] = Field([], max_length=MAX_PREFIXES)
    rewarm_s: float = Field(240.0, ge=30, le=3_600)  # G5: between two sweeps that repeat it
    keep_kv: bool = True  # G4: KV of its conversations outlives its engine, in the node's pool
    # For how long after a use, where the request says nothing: 5 min, 1 h, 24 h
    kv_term: KvTerm = "long"
    adapters: AdaptersConfig | None = None
    drafter: DrafterConfig | None = None  # with one it cannot sleep, nor have adapters
    threads: int | None = Field(None, ge=1)  # that compute; absent: the engine's own choice
    dispatch: DispatchConfig | None = None  # only for engines that can wait for their turn

    @field_validator("engine_args", "grow_to")
    @classmethod
    def _sizes(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Those that deployments.config.load_plan reads; the rest is for the engine to judge."""
        for name in (name for name in value if name.endswith("_bytes")):
            try:
                parse_size(value[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value

    @field_validator("grow_to")
    @classmethod
    def _longer(cls, value: dict[str, Any]) -> dict[str, Any]:
        tokens = value.get("max_model_len", 1)
        if type(tokens) is not int or tokens < 1:
            raise ValueError(f"max_model_len: {tokens!r} is not a number of tokens")
        return value

    @model_validator(mode="after")
    def _alone_with_its_drafter(self) -> "ModelConfig":
        if self.drafter and self.adapters:
            raise ValueError("a model with a `drafter` takes no `adapters`")
        return self

    @model_validator(mode="after")
    def _merges_as_it_is(self) -> "ModelConfig":
        if self.grow_to and self.adapters and self.adapters.merge:
            raise ValueError("a model with `grow_to` takes no `merge`: its copy does not grow")
        return self

    def with_thinking(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a text request, with `thinking` where they do not say themselves."""
        if self.thinking is None:
            return fields
        template_kwargs = fields.get("chat_template_kwargs") or {}
        return fields | {
            "chat_template_kwargs": {"enable_thinking": self.thinking} | template_kwargs
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """What the engine is started with, by its own names."""
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        return template | self.engine_args


def check_name(model: str) -> None:
    """Raises ValueError for what cannot be a model's name."""
    if not _NAME.fullmatch(model) or ".." in model:
        raise ValueError(f"model name {model!r}: use letters, digits, and . _ / - inside")
