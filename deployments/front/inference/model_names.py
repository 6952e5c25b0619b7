"""ModelNames: which engine a name means for a tenant: a model, `base:adapter`, or a bare adapter
name. Adapter folders are read in threads, because they may lie on a file server that hangs."""

import asyncio
import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from arbiter.core.types import Priority
from arbiter.errors import UnknownModel
from deployments.adapters.catalogue import Catalogue, CatalogueEntry
from deployments.adapters.safe_files import AdaptersAway
from deployments.config.adapter_names import bare_of, base_of, is_full
from deployments.config.file_threads import in_thread
from deployments.config.schema import Table

logger = logging.getLogger("ray.serve")
P = ParamSpec("P")
T = TypeVar("T")

# The most that a look into adapter folders may take. It takes milliseconds, but a file server may
# hang for hours.
FOLDERS_S = 5.0

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
        self._folders, urls = table.adapter_folders, table.adapter_urls
        self._adapters = Catalogue(self._folders, frozenset(self._homes), urls)

    async def find(self, name: str, tenant: str, *, within_s: float | None = None) -> Target:
        """`within_s`: what adapter folders may take; None: FOLDERS_S. Raises UnknownModel with near
        misses, also for another tenant's adapter; AdapterAmbiguous and AdapterInvalid; and
        AdaptersAway where folders are not read in time."""
        bound_s = FOLDERS_S if within_s is None else within_s
        if capability := self._homes.get(name):
            return Target(capability, name, name)
        models = tuple(sorted(self._homes))
        if not self._adapters.may_name(name):
            raise UnknownModel(name, "", models)  # at once: no folder need be looked into
        entry = await self._entry(name, tenant, bound_s)
        if entry is None:
            raise UnknownModel(name, "", models + await self._known(self._near, name, tenant))
        priority = Priority[entry.priority.upper()]
        return Target(self._homes[entry.base], entry.base, entry.full_name, priority)

    async def _entry(self, name: str, tenant: str, within_s: float) -> CatalogueEntry | None:
        """The adapter of a name. A bare name is looked for in every folder, because several models
        may have an adapter of it, and then it means none of them. Raises AdaptersAway."""
        try:
            where = base_of(name) if is_full(name) else None
            return await self._read(where, within_s, self._adapters.find, name, tenant)
        except OSError as error:
            raise AdaptersAway(name, _why(error, within_s)) from error

    def home(self, name: str) -> str:
        """The capability of a name that `visible` returned; reads no disk."""
        return self._homes[base_of(name)]

    async def visible(self, tenant: str) -> tuple[str, ...]:
        """Models, then adapters by full name, as far as these are read within FOLDERS_S."""
        return tuple(sorted(self._homes)) + await self._known(self._names, tenant)

    async def _known(
        self, look: Callable[P, tuple[str, ...]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[str, ...]:
        """What `look` finds in all folders; nothing where they cannot be read."""
        try:
            return await self._read(None, FOLDERS_S, look, *args, **kwargs)
        except OSError as error:
            logger.warning("no adapters are listed: %s", _why(error, FOLDERS_S))
            return ()

    async def _read(
        self,
        base: str | None,
        within_s: float,
        look: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Returns what `look` finds in the folder of the model `base`, or in all folders for None.
        Looks into the same folders run one after another. Raises OSError; after `within_s`
        TimeoutError, which is an OSError."""
        if not self._folders or (base is not None and base not in self._folders):
            return look(*args, **kwargs)  # reads no folder, because there is none
        folders = self._folders if base is None else {base: self._folders[base]}
        where = " ".join(sorted({str(folder) for folder in folders.values()}))
        async with asyncio.timeout(within_s):
            return await in_thread(f"adapters in {where}", look, *args, **kwargs)

    def _names(self, tenant: str) -> tuple[str, ...]:
        return tuple(self._adapters.names(tenant))

    def _near(self, name: str, tenant: str) -> tuple[str, ...]:
        adapters = self._adapters.names(tenant)
        bare = {bare_of(full): full for full in adapters}
        return (*_around(name, adapters), *_around(name, sorted(bare)))


def _why(error: OSError, within_s: float) -> str:
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"the adapter folders were not read within {within_s:g} s"
    return f"{error.filename}: {error.strerror}"


def _around(name: str, names: list[str]) -> list[str]:
    at = bisect.bisect(names, name)
    return names[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
