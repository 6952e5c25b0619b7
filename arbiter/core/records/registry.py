"""Keeps which capabilities and models exist (A2). Its typed errors name those that do."""

from difflib import get_close_matches

from arbiter.core.types import CapabilitySpec, ModelName, ModelSpec
from arbiter.errors import CapabilityConflict, UnknownCapability, UnknownModel, UnknownRole

NAMED_AT_MOST = 20  # names in one error message: a terminal's height, not 10,000 adapters


def _near(wanted: str, known: list[str]) -> tuple[str, ...]:
    """Returns the closest names first, then the rest."""
    near = get_close_matches(wanted, known, n=NAMED_AT_MOST, cutoff=0.5)
    return tuple((near + [name for name in known if name not in near])[:NAMED_AT_MOST])


class Registry:
    """Looks up capabilities and models of the table, and of Python."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self._roles = roles
        self.specs: dict[str, CapabilitySpec] = {}
        self.pinning: set[str] = set()  # capabilities with a pinned model
        self._models: dict[str, dict[str, ModelSpec]] = {}
        self.is_set = False  # False: the configuration has not come yet, so nothing is removed

    def replace(self, specs: tuple[CapabilitySpec, ...]) -> None:
        """Replaces the whole table. Raises UnknownRole, having changed nothing."""
        for spec in specs:
            self._check_role(spec)
        self.specs, self._models, self.pinning = {}, {}, set()
        for spec in specs:
            self._put(spec)
        self.is_set = True

    def register(self, spec: CapabilitySpec) -> None:
        """Adds a capability, or accepts it again unchanged. Raises UnknownRole, or
        CapabilityConflict, naming what differs."""
        self._check_role(spec)
        if spec.name not in self.specs:
            self._put(spec)
        old = self.specs[spec.name]
        fields = ("role", "engine", "models", "downscale_to_zero", "is_external")
        different = [f for f in fields if getattr(old, f) != getattr(spec, f)]
        if different:
            raise CapabilityConflict(spec.name, ", ".join(different))

    def _put(self, spec: CapabilitySpec) -> None:
        self.specs[spec.name] = spec
        self._models[spec.name] = {model.name: model for model in spec.models}
        if any(model.pinned for model in spec.models):
            self.pinning.add(spec.name)

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
