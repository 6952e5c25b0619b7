"""Keeps which capabilities and models exist (A2). Its typed errors name those that do."""

from difflib import get_close_matches

from arbiter.core.types import CapabilitySpec, Floor, ModelName, ModelSpec
from arbiter.errors import (
    NAMES_TOLD,
    CapabilityConflict,
    UnknownCapability,
    UnknownModel,
    UnknownRole,
)

NAMED_AT_MOST = NAMES_TOLD + 1  # one more, so that the message shows that there are others


def _near(wanted: str, names: list[str]) -> tuple[str, ...]:
    """Returns the closest names first, then the rest."""
    near = get_close_matches(wanted, names, n=NAMED_AT_MOST, cutoff=0.5)
    return tuple((near + [name for name in names if name not in near])[:NAMED_AT_MOST])


def _check_same(old: CapabilitySpec, new: CapabilitySpec) -> None:
    """Compares two specs of one name. Raises CapabilityConflict, naming what differs."""
    fields = ("role", "engine", "models", "downscale_to_zero", "is_external")
    different = [f for f in fields if getattr(old, f) != getattr(new, f)]
    if different:
        raise CapabilityConflict(new.name, ", ".join(different))


class Registry:
    """Looks up capabilities and models of the table, and of Python."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self._roles = roles
        self.specs: dict[str, CapabilitySpec] = {}  # of the table and of Python
        self._table: dict[str, CapabilitySpec] = {}
        self.registered: dict[str, CapabilitySpec] = {}  # from Python
        self.pinning: set[str] = set()  # capabilities with a pinned model
        self.configured_floors: dict[ModelName, Floor] = {}  # as configured; those above cold
        self.on_device: list[ModelName] = []  # of these, those with the device floor
        self.hours: dict[ModelName, str] = {}  # of models that have some (C13)
        self.batch_hours: dict[ModelName, str] = {}
        self.optional: set[ModelName] = set()  # requests are served without them too
        self._models: dict[str, dict[str, ModelSpec]] = {}
        self.is_set = False  # False: the configuration has not come yet, so nothing is removed

    def replace(self, specs: tuple[CapabilitySpec, ...]) -> None:
        """Takes the table; what Python registered stays beside it. Raises UnknownRole, or
        CapabilityConflict where the two differ, having changed nothing."""
        for spec in specs:
            self._check_role(spec)
            if spec.name in self.registered:
                _check_same(self.registered[spec.name], spec)
        self._table = {spec.name: spec for spec in specs}
        self._index()
        self.is_set = True

    def register(self, spec: CapabilitySpec) -> None:
        """Adds a capability from Python, which lasts until `unregister`, whatever the table has
        meanwhile. Raises UnknownRole, or CapabilityConflict, naming what differs from the
        capability known by this name."""
        self._check_role(spec)
        if spec.name in self.specs:
            _check_same(self.specs[spec.name], spec)
        self.registered[spec.name] = spec
        self._index()

    def unregister(self, capability: str) -> None:
        """Removes a capability that Python registered; a capability of the table stays. Raises
        UnknownCapability, naming what Python registered."""
        if capability not in self.registered:
            raise UnknownCapability(capability, _near(capability, sorted(self.registered)))
        del self.registered[capability]
        self._index()

    def _index(self) -> None:
        """Computes what is looked up from the table and what Python registered."""
        self.specs = {}
        self._models = {}
        self.pinning = set()
        self.configured_floors = {}
        self.hours = {}
        self.batch_hours = {}
        self.optional = set()
        for spec in (*self._table.values(), *self.registered.values()):
            self._put(spec)
        floors = self.configured_floors.items()
        self.on_device = [name for name, floor in floors if floor is Floor.DEVICE]

    def _put(self, spec: CapabilitySpec) -> None:
        """Adds one capability to what is looked up."""
        self.specs[spec.name] = spec
        self._models[spec.name] = {model.name: model for model in spec.models}
        if any(model.pinned for model in spec.models):
            self.pinning.add(spec.name)
        above_cold = (model for model in spec.models if model.floor is not Floor.COLD)
        self.configured_floors |= {
            ModelName(spec.name, model.name): model.floor for model in above_cold
        }
        names = {ModelName(spec.name, model.name): model for model in spec.models}
        self.hours |= {name: model.hours for name, model in names.items() if model.hours}
        batch = {name: model.batch_hours for name, model in names.items() if model.batch_hours}
        self.batch_hours |= batch
        self.optional |= {name for name, model in names.items() if model.is_optional}

    def _check_role(self, spec: CapabilitySpec) -> None:
        if spec.role not in self._roles:
            raise UnknownRole(spec.role, spec.name, _near(spec.role, list(self._roles)))

    def find(self, name: ModelName) -> ModelSpec:
        """Returns a model as configured. Raises UnknownCapability or UnknownModel."""
        capability, model = name
        spec = self.specs.get(capability)
        if spec is None:
            raise UnknownCapability(capability, _near(capability, sorted(self.specs)))
        if found := self._models[capability].get(model):
            return found
        names = sorted(m.name for m in spec.models)
        raise UnknownModel(model, capability, _near(model, names))
