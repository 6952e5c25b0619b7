"""The model whose next use is farthest away leaves first. It needs to know the future, so only a
replay can use it, as a bound: on models of one size no policy does better (Belady 1966)."""

from arbiter.core.view import Candidate, Price


def price(c: Candidate) -> Price:
    """A model that is never used again leaves before every other."""
    if c.next_use is None:
        return Price(rank=(0, 0, c.ticket))
    return Price(rank=(1, -c.next_use, c.ticket))
