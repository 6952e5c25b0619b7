"""The model of the role worth least leaves first; within a role the model whose loss is expected to
cost the fewest seconds (C3): the seconds to bring it back, times the odds that it is wanted again
within the window over which rates are kept.

The core takes the set of least sum for the bytes it must free, and looks at the cheapest per byte
first. Greedy-Dual-Size-Frequency (Cherkasova 1998) prices web pages alike.
"""

from math import exp

from arbiter.core.view import Candidate, Price
from policies import reload


def price(candidate: Candidate) -> Price:
    """Returns the role's rank, and the seconds that losing the candidate is expected to cost."""
    reuse_chance = 1 - exp(-candidate.recent_count)  # at least one arrival of a Poisson process
    return Price(
        rank=(candidate.role_rank,),
        cost_s=reload.expected_s(candidate) * reuse_chance + candidate.evict_cost_s,
    )
