"""The model of the role worth least leaves first; within a role the least recently used."""

from arbiter.core.view import Candidate, Price


def price(c: Candidate) -> Price:
    return Price(rank=(c.role_rank, c.last_used, c.ticket))
