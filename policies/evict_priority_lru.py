"""The model of the role worth least leaves first; within a role the least recently used."""

from arbiter.core.view import Candidate, Price


def price(candidate: Candidate) -> Price:
    """Returns a rank that orders candidates by role, then by last use; the lowest leaves first."""
    return Price(rank=(candidate.role_rank, candidate.last_used, candidate.ticket))
