"""The role worth least, then the fewest seconds that losing it is expected to cost: to bring it
back, times how likely it is wanted soon, by weights that the device has learned from its own loads
(arbiter/core/records/reuse.py).

Workloads differ in how much the time since the last use, the recent rate and the lasting rate say,
so no fixed formula suits all. The clock counts turnovers and not hours, because a device that loads
little forgets little (docs/adr/0040, docs/benchmarks.md).
"""

from arbiter.core.view import Candidate, Price
from policies import reload


def price(c: Candidate) -> Price:
    cost_s = reload.expected_s(c) * c.reuse.chance + c.evict_cost_s
    return Price((c.role_rank,), cost_s, c.reuse)
