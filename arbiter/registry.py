"""Which capabilities and models exist (SPEC A2). Typed errors name what does."""

from difflib import get_close_matches

from arbiter.errors import CapabilityConflict, UnknownCapability, UnknownModel, UnknownRole
from arbiter.events import CapabilitySpec, ModelSpec

NAMED_AT_MOST = 20  # names in one error message: a terminal's height, not 10,000 adapters


def _near(wanted: str, known: list[str]) -> tuple[str, ...]:
    """The closest names first, then the rest."""
    near = get_close_matches(wanted, known, n=NAMED_AT_MOST, cutoff=0.5)
    return tuple((near + [name for name in known if name not in near])[:NAMED_AT_MOST])


class Registry:
    def __init__(self, roles: tuple[str, ...]) -> None:
        self._roles = roles
        self.specs: dict[str, CapabilitySpec] = {}
        self.is_set = False  # False: the configuration has not come yet, so nothing is removed

    def replace(self, specs: tuple[CapabilitySpec, ...]) -> None:
        """Raises UnknownRole, having changed nothing."""
        for spec in specs:
            self._check_role(spec)
        self.specs = {spec.name: spec for spec in specs}
        self.is_set = True

    def register(self, spec: CapabilitySpec) -> None:
        """Raises UnknownRole, or CapabilityConflict, naming what differs."""
        self._check_role(spec)
        old = self.specs.setdefault(spec.name, spec)
        fields = ("role", "engine", "models", "downscale_to_zero", "is_external")
        different = [f for f in fields if getattr(old, f) != getattr(spec, f)]
        if different:
            raise CapabilityConflict(spec.name, ", ".join(different))

    def _check_role(self, spec: CapabilitySpec) -> None:
        if spec.role not in self._roles:
            raise UnknownRole(spec.role, spec.name, _near(spec.role, list(self._roles)))

    def find(self, capability: str, model: str) -> ModelSpec:
        """Raises UnknownCapability or UnknownModel."""
        spec = self.specs.get(capability)
        if spec is None:
            raise UnknownCapability(capability, _near(capability, sorted(self.specs)))
        for candidate in spec.models:
            if candidate.name == model:
                return candidate
        names = sorted(m.name for m in spec.models)
        raise UnknownModel(model, capability, _near(model, names))
