"""A row of `capabilities` in the table: a kind of work, with the models that do it."""

import re
from dataclasses import replace
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from arbiter.core import types
from arbiter.units import LONGEST_S, Bytes, seconds
from deployments.config.arbiter_section import in_zone
from deployments.config.fields import Strict
from deployments.config.model_section import ESPEAK, ModelConfig, check_name

# A capability's name is that of its Serve application, and stands in labels of metrics. It is also
# in the name of a slab's memory file, by which arbiter/node/pool.py finds the slab: the kernel
# takes 249 bytes of that name, and 64 letters of this one leave room for the rest.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# HTTP paths that a capability may add: without placeholders, and none of the front's own.
_PATH = re.compile(r"(/[a-z0-9][a-z0-9._-]*){1,8}")
_RESERVED = re.compile(r"/(arbiter|health|ready|docs|openapi\.json|v1/models)(/.*)?")

CLASS = r"^([a-z]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

MERGED = "+merged"  # ends the name of a copy of a model with an adapter in its weights (F7)

# The models of a capability of role `tts` that names none (H4)
_WITHOUT_MODELS = {
    "espeak": {
        "source": ESPEAK,
        "need": {"weights": "1 MiB", "working": "16 MiB", "context": "14 MiB"},  # measured
        "can_sleep": False,
        "engine_args": {"voices": {"alloy": "en-us"}},  # which most clients of OpenAI send
    }
}


class CapabilityConfig(Strict):
    """All there is to say of a capability: the front makes its Serve application from it, unless
    the file has an application of its name."""

    model_config = ConfigDict(serialize_by_alias=True)

    role: str
    engine: str  # a name in deployments.config.engine_kinds.ENGINES, or `module:function`
    models: dict[str, ModelConfig] = Field(min_length=1)
    # A name in deployments.app.CLASSES, or `module:Class`, a subclass of Capability; absent: that
    # of the role, or Capability itself where `paths` are given
    class_: str | None = Field(None, alias="class", pattern=CLASS)
    # G3: Serve starts another for more requests at once than its `target_ongoing_requests`; it gets
    # a copy of a model when the replicas that have it are full (their `max_ongoing_requests`)
    max_replicas: int = Field(1, ge=1, le=64)
    keep_warm_s: float | None = Field(None, ge=-1, le=LONGEST_S)
    downscale_to_zero_s: float = Field(300.0, ge=0, le=LONGEST_S)  # H0
    # D2: `external`: requests load nothing, a control plane sets what is resident
    managed: Literal["self", "external"] = "self"
    # Paths that the front routes to its models, as `/v1/rerank`; empty: those of its class. The
    # table has them because the front knows nothing else of an application with zero replicas
    paths: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _spoken_without_models(cls, section: object) -> object:
        """espeak-ng, by the engine that knows its name."""
        if isinstance(section, dict) and not section.get("models"):
            if (section.get("role"), section.get("engine")) == ("tts", "vits"):
                return section | {"models": _WITHOUT_MODELS}
        return section

    @field_validator("paths")
    @classmethod
    def _free_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not _PATH.fullmatch(path) or ".." in path:
                raise ValueError(f"path {path!r}: write it as `/v1/rerank`")
            if _RESERVED.fullmatch(path):
                raise ValueError(f"path {path!r} is one of the front's own")
        return value

    @field_validator("models")
    @classmethod
    def _plain_names(cls, value: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        for name in value:
            check_name(name)
        return value

    @model_validator(mode="after")
    def _known_drafters(self) -> "CapabilityConfig":
        for name, model in self.models.items():
            drafter = model.drafter.model if model.drafter else None
            if drafter is not None and (drafter == name or drafter not in self.models):
                raise ValueError(f"{name}: its drafter {drafter!r} is no other model of these")
        return self

    def _model_spec(self, model: str, keep_warm_s: float, zone: str) -> types.ModelSpec:
        """`keep_warm_s`: of its role, where neither the model nor the capability says otherwise."""
        config = self.models[model]
        configured = (s for s in (config.keep_warm_s, self.keep_warm_s) if s is not None)
        return types.ModelSpec(
            model,
            seconds(next(configured, keep_warm_s)),
            config.pin,
            config.allow_oversize,
            dispatch_lock=config.dispatch.lock if config.dispatch else "",
            shared_scratch_bytes=Bytes(config.dispatch.scratch if config.dispatch else 0),
            floor=types.Floor(config.floor),
            hours=in_zone(config.hours, zone),
            batch_hours=in_zone(config.batch_hours, zone),
        )

    def _merges(self, model: str) -> bool:
        adapters = self.models[model].adapters
        return adapters is not None and adapters.merge is not None

    def as_spec(self, name: str, keep_warm_s: float, zone: str = "") -> types.CapabilitySpec:
        """`keep_warm_s`: of its role. `zone`: of hours that name none."""
        models = [self._model_spec(m, keep_warm_s, zone) for m in sorted(self.models)]
        copies = [_of_merged_copy(spec) for spec in models if self._merges(spec.name)]
        return types.CapabilitySpec(
            name,
            self.role,
            self.engine,
            (*models, *copies),
            seconds(self.downscale_to_zero_s),
            is_external=self.managed == "external",
        )


def _of_merged_copy(base: types.ModelSpec) -> types.ModelSpec:
    return replace(
        base,
        name=base.name + MERGED,
        pinned=False,
        allow_oversize=False,
        floor=types.Floor.COLD,
        is_optional=True,
    )


def plainly_named(capabilities: dict[str, CapabilityConfig]) -> dict[str, CapabilityConfig]:
    """The capabilities, if their names are names. Raises ValueError."""
    for name in capabilities:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"capability name {name!r}: use at most 64 letters, digits, and . _ - inside"
            )
    return capabilities
