"""ModelNames: which engine a name means for a tenant: a model, `base:adapter`, or a bare adapter
name."""

import bisect
from dataclasses import dataclass

from arbiter.core.types import Priority
from arbiter.errors import UnknownModel
from deployments.adapters.catalogue import Catalogue
from deployments.config.schema import Table

# Names on either side of a wrong name in the alphabet that are compared with it for a near miss.
# Comparing all of 10,000 would block the front for a tenth of a second.
NEIGHBOURS = 50


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes."""

    capability: str
    model: str  # the one to make resident
    served: str  # what the engine is asked for: the model, or one of its adapters by full name
    priority: Priority = Priority.NORMAL  # as the adapter's owner set it


class ModelNames:
    """The names of one table; adapters come and go on disk."""

    def __init__(self, table: Table) -> None:
        self._homes = table.homes
        folders, urls = table.adapter_folders, table.adapter_urls
        self._adapters = Catalogue(folders, frozenset(self._homes), urls)

    def find(self, name: str, tenant: str) -> Target:
        """Raises UnknownModel with near misses, also for another tenant's adapter; and
        AdapterAmbiguous, AdapterInvalid."""
        if capability := self._homes.get(name):
            return Target(capability, name, name)
        entry = self._adapters.find(name, tenant)
        if entry is None:
            raise UnknownModel(name, "", self._near(name, tenant))
        priority = Priority[entry.priority.upper()]
        return Target(self._homes[entry.base], entry.base, entry.full_name, priority)

    def home(self, name: str) -> str:
        """The capability of a name that `visible` returned; reads no disk."""
        return self._homes[self.base(name)]

    def base(self, name: str) -> str:
        """The model of a name that `visible` returned: itself, or an adapter's base."""
        return name if name in self._homes else name.partition(":")[0]

    def visible(self, tenant: str) -> list[str]:
        """Models, then adapters by full name."""
        return sorted(self._homes) + self._adapters.names(tenant)

    def _near(self, name: str, tenant: str) -> tuple[str, ...]:
        adapters = self._adapters.names(tenant)
        bare = {full.partition(":")[2]: full for full in adapters}
        return (*sorted(self._homes), *_around(name, adapters), *_around(name, sorted(bare)))


def _around(name: str, names: list[str]) -> list[str]:
    at = bisect.bisect(names, name)
    return names[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
