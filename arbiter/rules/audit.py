"""All the books from the tickets up, trusting no index: more than is checked after each event."""

from arbiter.errors import LedgerBroken
from arbiter.ledger import CHARGED, LEAVING, Book, Ledger, State


def audit(ledger: Ledger) -> None:
    """Raises LedgerBroken where an index differs from the tickets."""
    ledger.check(set(ledger.books))
    for book in ledger.books.values():
        _audit_book(ledger, book)
    if ledger.entries(State.CLOSED):
        raise LedgerBroken("a closed ticket is still on the books")
    for holder in {e.holder for e in ledger.entries()}:
        charged = {e.ticket for e in ledger.held_by(holder) if e.state in CHARGED}
        if charged != ledger.holding(holder).keys():
            raise LedgerBroken(f"{holder}: holding {sorted(charged)}, index differs")


def _audit_book(ledger: Ledger, book: Book) -> None:
    device = book.device
    charged = {e.ticket for e in ledger.entries() if e.charge(device) > 0}
    if charged != book.entries.keys():
        raise LedgerBroken(f"{device}: index {sorted(book.entries)} != {sorted(charged)}")
    leaving = {t for t, e in book.entries.items() if e.state in LEAVING}
    if leaving != book.leaving.keys():
        raise LedgerBroken(f"{device}: leaving {sorted(book.leaving)} != {sorted(leaving)}")
    loading = {t for t, e in book.entries.items() if e.state is State.LOADING}
    if loading != book.loading.keys():
        raise LedgerBroken(f"{device}: loading {sorted(book.loading)} != {sorted(loading)}")
    pinned = sum(e.charge(device) for e in book.entries.values() if e.pinned)
    if pinned != book.pinned_bytes or book.copies.total() != len(book.entries):
        raise LedgerBroken(f"{device}: pinned {book.pinned_bytes}, entries {pinned}")
