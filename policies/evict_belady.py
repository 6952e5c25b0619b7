"""What is wanted again last goes first. Needs the future, so only a replay can use it: no policy
without it does better on models of one size (Belady 1966)."""

from arbiter.core.view import Candidate, Price


def price(c: Candidate) -> Price:
    """Never again goes before everything."""
    if c.next_use is None:
        return Price(rank=(0, 0, c.ticket))
    return Price(rank=(1, -c.next_use, c.ticket))
