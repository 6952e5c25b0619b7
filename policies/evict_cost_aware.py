"""The role worth least, then the fewest seconds that losing it is expected to cost (C3): those
to bring it back, times how likely it is wanted again within the window over which rates are kept.

The core takes the set of least sum for the bytes it must free, and looks at the cheapest per byte
first. Greedy-Dual-Size-Frequency (Cherkasova 1998) prices web pages alike.
"""

from math import exp

from arbiter.core.view import Candidate, Price
from arbiter.units import in_seconds

UNKNOWN_LOAD_S = 10.0  # never measured, and nothing to estimate from: a mid-size model from disk


def price(c: Candidate) -> Price:
    reload_s = in_seconds(c.reload) or UNKNOWN_LOAD_S
    wanted = 1 - exp(-c.recent_count)  # at least one arrival of a Poisson process
    return Price(rank=(c.role_rank,), cost_s=reload_s * wanted + c.evict_cost_s)
