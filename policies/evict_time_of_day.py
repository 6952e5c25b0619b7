"""The model of the role worth least leaves first; within a role the model whose loss is expected to
cost the fewest seconds: the seconds to bring it back, times how often it is used of late and how
often it usually is in the coming hours of the day.

The recent rate forgets a model that is used each morning; the usual rate keeps a model that is not
used today. Their geometric mean is high only for a model with both. It is the best formula of its
kind on the tuned half of public traces, whose clients swing with the day (docs/adr/0007,
docs/benchmarks.md). Shahrad et al. (ATC 2020) keep functions warm by habits as well, by histograms
of their gaps."""

from math import sqrt

from arbiter.core.view import Candidate, Price
from policies import reload

UNSEEN_COUNT = 0.02  # a rate four windows after one use; below it only the other rate counts


def price(candidate: Candidate) -> Price:
    """Returns the role's rank, and the seconds that losing the candidate is expected to cost."""
    often = sqrt((candidate.recent_count + UNSEEN_COUNT) * (candidate.usual_count + UNSEEN_COUNT))
    return Price(
        rank=(candidate.role_rank,),
        cost_s=reload.expected_s(candidate) * often + candidate.evict_cost_s,
    )
