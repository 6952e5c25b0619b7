"""Memory that outlives the process which fills it: slabs of equal rows, one memory file each."""

from arbiter.errors import RowMisused, SlabUnusable
from arbiter.pool.layout import Mark, Removal, Term
from arbiter.pool.rows import Reserved, Rows
from arbiter.pool.slab import Counts, Slab, SlabFile, SlabView, create
from arbiter.pool.slab_file import SavedRows

__all__ = [
    "Counts",
    "Mark",
    "Removal",
    "Reserved",
    "RowMisused",
    "Rows",
    "SavedRows",
    "Slab",
    "SlabFile",
    "SlabUnusable",
    "SlabView",
    "Term",
    "create",
]
