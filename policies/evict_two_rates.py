"""The role worth least, then the fewest seconds that losing it is expected to cost: to bring it
back, times how often it is used by two clocks at once, the last hour and a half and the last day.

One clock is wrong half of the time. A short one forgets the model that is asked for each morning,
a long one keeps what was popular yesterday. Their geometric mean is high only for what is used both
now and usually; it was the best of its kind on the tuned half of public traces, and closes about
half of the gap between LRU and Belady on the other (docs/benchmarks.md). Hyperbolic caching
(Blankstein 2017) and LHD (Beckmann 2018) price by rates as well, by one window each.
"""

from math import sqrt

from arbiter.core.view import Candidate, Price
from arbiter.units import in_seconds

UNKNOWN_LOAD_S = 10.0  # never measured, and nothing to estimate from: a mid-size model from disk
UNSEEN_COUNT = 0.02  # four windows after one use; beyond that only the other clock tells apart


def price(c: Candidate) -> Price:
    reload_s = in_seconds(c.reload) or UNKNOWN_LOAD_S
    often = sqrt((c.recent_count + UNSEEN_COUNT) * (c.lasting_count + UNSEEN_COUNT))
    return Price(rank=(c.role_rank,), cost_s=reload_s * often + c.evict_cost_s)
