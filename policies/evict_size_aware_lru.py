"""A ticket that was long unused, is large and of a role worth little leaves first: its score is
0.6 recency + 0.2 size + 0.2 role (C3).

The ticket with the least score leaves first. Each part of the score lies between 0 and 1 on a scale
of its own, so that each matters. Recency is 1 right after a use, one half five minutes later, and
tends to 0. Size is 0 for a ticket that frees the whole budget of its device, and near 1 for a small
ticket. Role is the role's rank against that of the dearest role.
"""

from arbiter.core.view import Candidate, Price
from arbiter.units import seconds

RECENCY, SIZE, ROLE = 0.6, 0.2, 0.2
UNUSED_HALF = seconds(300)  # C8: the usual keep-warm time
DEAREST_ROLE = 100  # text; see policies/roles.py


def price(candidate: Candidate) -> Price:
    """Returns a rank that orders candidates by their score; the lowest leaves first."""
    unused = max(0, candidate.now - candidate.last_used)
    recent = UNUSED_HALF / (UNUSED_HALF + unused)
    small = 1 - min(1, candidate.freed_bytes / max(1, candidate.budget_bytes))
    score = RECENCY * recent + SIZE * small + ROLE * candidate.role_rank / DEAREST_ROLE
    return Price(rank=(score, candidate.last_used, candidate.ticket))
