"""The model whose next use is farthest away leaves first. The policy needs to know the future, so
only a replay can use it, as a bound: on models of one size no policy does better (Belady 1966)."""

from arbiter.core.view import Candidate, Price


def price(candidate: Candidate) -> Price:
    """Returns a rank that orders candidates by their next use, the farthest first. A model that is
    never used again leaves before every other."""
    if candidate.next_use is None:
        return Price(rank=(0, 0, candidate.ticket))
    return Price(rank=(1, -candidate.next_use, candidate.ticket))
