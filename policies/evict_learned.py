"""The model of the role worth least leaves first; within a role the model whose loss is expected to
cost the fewest seconds: the seconds to bring it back, times how likely it is wanted soon. The core
learns that likelihood from the loads of its own devices (arbiter/core/records/reuse.py).

Workloads differ in how much the time since the last use, the recent rate and the lasting rate say,
so no fixed formula suits all. "Soon" is told in turnovers and not in hours, because a device that
loads little forgets little (docs/adr/0040, docs/benchmarks.md).
"""

from arbiter.core.view import Candidate, Price
from policies import reload


def price(candidate: Candidate) -> Price:
    """Returns the role's rank, and the seconds that losing the candidate is expected to cost."""
    cost_s = reload.expected_s(candidate) * candidate.reuse.chance + candidate.evict_cost_s
    return Price((candidate.role_rank,), cost_s, candidate.reuse)
