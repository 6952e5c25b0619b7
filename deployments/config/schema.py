"""Everything a person may write into the front's `user_config` in serve_config.yaml.

One table for the whole system: the arbiter's settings and every capability with its models. The
front checks it, hands it to the arbiter, which keeps it and hands it to replicas, and deploys each
capability, so a change restarts nothing and a capability with zero replicas is known. Unknown keys
are refused by name.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import DEFAULT_TENANT, LONGEST_S, Bytes, seconds
from deployments.config.arbiter_section import ArbiterConfig, in_zone
from deployments.config.fields import Hours, KvTerm, Size, Strict, parse_size
from deployments.config.jobs_section import JobsConfig
from deployments.config.remotes_section import RemotesConfig
from deployments.config.task_section import PREFIX, TaskConfig, check_ladders, named
from deployments.config.url_allowlist import is_prefix
from policies import ROLES

# HTTP paths that a capability may add: no placeholders, nothing of the front's own.
_PATH = re.compile(r"(/[a-z0-9][a-z0-9._-]*){1,8}")
_RESERVED = re.compile(r"/(arbiter|health|ready|docs|openapi\.json|v1/models)(/.*)?")

# Names end up in URLs, file names and metric labels; `:` separates a base from its adapter.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

CLASS = r"^([a-z]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

MAX_PREFIXES = 32  # of one model; each is a request of one token, sent to an idle engine

ESPEAK = "espeak-ng"  # as the source of a model: espeak-ng's own voices, which need no file
MERGED = "+merged"  # ends the name of a copy of a model with an adapter in its weights (F7)

# What speaks where a capability that speaks names no model (H4)
_WITHOUT_MODELS = {
    "espeak": {
        "source": ESPEAK,
        "need": {"weights": "1 MiB", "working": "16 MiB", "context": "14 MiB"},  # measured
        "can_sleep": False,
        "engine_args": {"voices": {"alloy": "en-us"}},  # which most clients of OpenAI send
    }
}


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
    rebalance_s: float = Field(60.0, gt=0, le=3_600)  # between two turns of slots and images
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
        given = fields.get("chat_template_kwargs") or {}
        return fields | {"chat_template_kwargs": {"enable_thinking": self.thinking} | given}

    @property
    def arguments(self) -> dict[str, Any]:
        """What the engine is started with, by its own names."""
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        return template | self.engine_args


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
    def _spoken_without_models(cls, given: object) -> object:
        """espeak-ng, by the engine that knows its name."""
        if isinstance(given, dict) and not given.get("models"):
            if (given.get("role"), given.get("engine")) == ("tts", "vits"):
                return given | {"models": _WITHOUT_MODELS}
        return given

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
            if not _NAME.fullmatch(name) or ".." in name:
                raise ValueError(f"model name {name!r}: use letters, digits, and . _ / - inside")
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
        said = (s for s in (config.keep_warm_s, self.keep_warm_s) if s is not None)
        return types.ModelSpec(
            model,
            seconds(next(said, keep_warm_s)),
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
    # Of a request's body: seconds until its next piece comes, and until it is whole. The longest is
    # 32 MiB, which takes 270 s at 1 Mbit/s; an upload to /v1/files has an hour.
    body_piece_s: float = Field(20.0, gt=0, le=600)
    body_s: float = Field(300.0, gt=0, le=3_600)
    # Of the bodies of all requests in flight, which the front keeps until they are answered: 1 MiB
    # for each of 1,000, or 32 of the longest. Bodies of up to 64 KiB are taken beyond it.
    bodies_bytes: Annotated[Size, Field(ge=32 << 20)] = 1 << 30
    keys_file: str | None = None  # API keys, mode 0600; default: beside the arbiter's state
    hosts: tuple[str, ...] = ()  # names this front is called by, besides addresses and localhost
    origins: tuple[str, ...] = ()  # other sites whose pages may call it, as `https://name:port`


class Table(Strict):
    """The front's `user_config`."""

    front: FrontConfig = FrontConfig()
    arbiter: ArbiterConfig = ArbiterConfig()
    jobs: JobsConfig = JobsConfig()
    capabilities: dict[str, CapabilityConfig]
    remotes: RemotesConfig = RemotesConfig()  # J5
    tasks: Annotated[dict[str, TaskConfig], AfterValidator(named)] = Field({})  # J5

    @model_validator(mode="after")
    def _known_rungs(self) -> "Table":
        check_ladders(self.tasks, self.homes, self.remotes.homes)
        return self

    @model_validator(mode="after")
    def _known_roles(self) -> "Table":
        for name, capability in self.capabilities.items():
            if self.arbiter.keep_warm_s_of(capability.role) is None:
                known = ", ".join(sorted(ROLES.keys() | self.arbiter.roles.keys()))
                raise ValueError(
                    f"capabilities.{name}.role: no role {capability.role!r}; there is: {known}, or "
                    "a new one in `arbiter.roles`"
                )
        return self

    @model_validator(mode="after")
    def _known_stages(self) -> "Table":
        for number, pipeline in enumerate(self.arbiter.pipelines):
            if unknown := [stage for stage in pipeline if stage not in self.capabilities]:
                known = ", ".join(sorted(self.capabilities))
                raise ValueError(
                    f"arbiter.pipelines[{number}]: no capability {unknown[0]!r}; there is: {known}"
                )
        return self

    @model_validator(mode="after")
    def _one_home_per_model(self) -> "Table":
        homes: dict[str, str] = {}
        for capability, config in self.capabilities.items():
            for model in config.models:
                if self.tasks and model == PREFIX.removesuffix(":"):
                    raise ValueError(f"model {model!r}: {PREFIX}NAME is the name of a task")
                if other := homes.setdefault(model, capability):
                    if other != capability:
                        raise ValueError(f"model {model!r} is in both {other!r} and {capability!r}")
        return self

    @model_validator(mode="after")
    def _remote_names_are_free(self) -> "Table":
        homes = self.homes
        for model, remote in self.remotes.homes.items():
            if not _NAME.fullmatch(model) or ".." in model:
                raise ValueError(f"model name {model!r}: use letters, digits, and . _ / - inside")
            if model in homes:
                raise ValueError(
                    f"model {model!r} is both in {homes[model]!r} and at the remote {remote!r}"
                )
        return self

    @property
    def homes(self) -> dict[str, str]:
        """Model name to capability name."""
        return {m: name for name, c in self.capabilities.items() for m in c.models}

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """Model name to adapter folder, as deployments.adapters.catalogue.Catalogue takes it."""
        return {
            m: Path(config.adapters.folder).expanduser()
            for c in self.capabilities.values()
            for m, config in c.models.items()
            if config.adapters
        }

    @property
    def adapter_urls(self) -> dict[str, tuple[str, ...]]:
        """Model name to the prefixes that its adapters may be fetched from."""
        models = [row for c in self.capabilities.values() for row in c.models.items()]
        return {m: config.adapters.urls for m, config in models if config.adapters}

    def as_event(self) -> ev.CapabilitiesSet:
        specs = []
        for name, config in sorted(self.capabilities.items()):
            keep_warm_s = self.arbiter.keep_warm_s_of(config.role)
            assert keep_warm_s is not None  # or `_known_roles` had refused the table
            specs.append(config.as_spec(name, keep_warm_s, self.arbiter.time_zone))
        return ev.CapabilitiesSet(tuple(specs))


class FrontArgs(Strict):
    """`args` of the front application; a change restarts the front."""


class CapabilityArgs(Strict):
    """`args` of a capability application that the file has."""

    capability: str  # a name in the table
    # `module:Class`, a subclass of Capability; absent: Capability itself
    class_: str | None = Field(None, alias="class", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    max_replicas: int = Field(1, ge=1, le=64)  # as in CapabilityConfig


class ConfigError(ValueError):
    """A configuration that must not start. The text names each key and what is wrong with it."""


def check_file(path: Path) -> Table:
    """Reads and checks a whole serve_config.yaml; returns the front's table. Raises ConfigError."""
    import yaml
    from ray.serve.schema import DeploymentSchema, ServeDeploySchema

    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping with `applications:`")
    _refuse_unknown(raw, ServeDeploySchema, str(path))
    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, str(path))) from error
    for app in raw["applications"]:
        for block in app.get("deployments", []):
            _refuse_unknown(block, DeploymentSchema, f"{path}: {app['name']}.{block['name']}")
    return _check_applications(raw["applications"], path)


def _refuse_unknown(raw: dict[str, Any], schema: type[BaseModel], where: str) -> None:
    known = set(schema.model_fields)
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _check_applications(applications: list[dict[str, Any]], path: Path) -> Table:
    by_name = {app["name"]: app for app in applications}
    blocks = by_name.get("front", {}).get("deployments") or [{}]
    if "user_config" not in blocks[0]:
        raise ConfigError(f"{path}: application `front` needs a deployment with `user_config`")
    table = parse_table(blocks[0]["user_config"], f"{path}: front.user_config")
    for name in ("front", "jobs"):
        if name in table.capabilities:
            raise ConfigError(
                f"{path}: capability {name!r} has the name of the application of our own {name}"
            )
    for name, app in by_name.items():
        if (
            name != "front"
            and app.get("args", {}).get("capability", name) not in table.capabilities
        ):
            raise ConfigError(f"{path}: application {name!r} serves a capability not in the table")
    return table


def parse_table(raw: object, where: str = "user_config") -> Table:
    """Raises ConfigError that names every bad key."""
    try:
        return Table.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from error


def _explain(error: ValidationError, where: str) -> str:
    lines = [
        f"{where}.{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    ]
    return "\n".join(lines)
