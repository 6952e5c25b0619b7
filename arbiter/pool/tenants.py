"""What a slab knows of tenants: how many rows each may have, and whose are to be erased (E6)."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from arbiter.pool import layout
from arbiter.pool.layout import Buffer, Removal


def owner_digest(tenant: str) -> bytes:
    """Returns the digest by which a mark names the owner of what a person put there. `tenant`:
    empty for what all share."""
    return layout.tenant_digest(tenant) if tenant else layout.SHARED


def caps_by_digest(caps: Mapping[str, float]) -> dict[bytes, float]:
    """Returns caps by the digests of tenants. `caps`: by the tenants' names, as an engine's
    configuration has them."""
    return {layout.tenant_digest(tenant): cap for tenant, cap in caps.items()}


class TenantRows:
    """Counts how many rows each tenant has in a slab, READY or reserved, and keeps which READY rows
    a capped tenant has: at its cap it loses one of them with each that it adds. `fractions`: of a
    slab's rows, what a tenant may have, by its digest; all of them where it has no entry."""

    def __init__(self, fractions: Mapping[bytes, float]) -> None:
        self._fractions = dict(fractions)
        self._held: Counter[bytes] = Counter()
        # Of capped tenants alone, the least recently used first.
        self._ready: dict[bytes, OrderedDict[bytes, None]] = {t: OrderedDict() for t in fractions}

    def set_fractions(
        self, fractions: Mapping[bytes, float], ready: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """Sets what part of the rows each tenant may have. `ready`: tenant and key of all READY
        rows, the least recently used first."""
        self._fractions = dict(fractions)
        self._ready = {t: OrderedDict() for t in fractions}
        for tenant, key in ready:
            self.note_use(tenant, key)

    def note_use(self, tenant: bytes, key: bytes) -> None:
        """Notes a use of a READY row, now or before."""
        if (own := self._ready.get(tenant)) is not None:
            own[key] = None
            own.move_to_end(key)

    def note_end(self, tenant: bytes, key: bytes) -> None:
        """Notes that a READY row has gone."""
        if (own := self._ready.get(tenant)) is not None:
            del own[key]

    def ready(self, tenant: bytes) -> Iterable[bytes]:
        """Returns the keys of a capped tenant's READY rows, the least recently used first."""
        return self._ready[tenant]

    @property
    def capped(self) -> list[bytes]:
        return list(self._fractions)

    def add(self, tenant: bytes, more: int) -> None:
        """Notes that a tenant has so many rows more, or less."""
        self._held[tenant] += more
        if not self._held[tenant]:
            del self._held[tenant]

    def held(self, tenant: bytes) -> int:
        return self._held[tenant]

    def cap(self, tenant: bytes, rows_count: int) -> int:
        """Returns how many of so many rows a tenant may have."""
        return int(self._fractions.get(tenant, 1.0) * rows_count)

    def is_capped(self, tenant: bytes) -> bool:
        return tenant in self._fractions


class Erasure:
    """Reads and writes the words in a slab's header by which the owner has its writer erase the
    rows of one removed tenant at a time: which they are, the number of the removal, which is
    written last, and the number of the removal that the writer has carried out. No other removal
    begins before that."""

    def __init__(self, buffer: Buffer) -> None:
        start, end = layout.ERASE_AT, layout.ERASE_AT + layout.ERASE_BYTES
        self._until = buffer[start + 16 : start + 24].cast("d")
        self._tenant = buffer[start + 24 : end]
        self._numbers = buffer[start : start + 16].cast("Q")

    def begin(self, removal: Removal) -> bool:
        """Begins a removal; the slab's owner calls this. False: an earlier one is still open."""
        if self.removal is not None:
            return False
        self._tenant[:], self._until[0] = removal
        self._numbers[0] = (self._numbers[0] + 1) % (1 << 63)
        return True

    @property
    def removal(self) -> Removal | None:
        """Returns which rows are to go; None where no removal is open."""
        if self._numbers[0] == self._numbers[1]:
            return None
        return Removal(bytes(self._tenant), self._until[0])

    def finish(self) -> None:
        """Marks the removal as done; the slab's writer calls this once none of these rows is
        left."""
        self._numbers[1] = self._numbers[0]

    def release(self) -> None:
        self._tenant.release()
        self._until.release()
        self._numbers.release()
