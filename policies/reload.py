"""What it takes to bring a victim back, as several policies price it."""

from arbiter.core.view import Candidate
from arbiter.units import in_seconds

UNKNOWN_LOAD_S = 10.0  # never measured, and nothing to estimate from: a mid-size model from disk


def expected_s(candidate: Candidate) -> float:
    """Returns the seconds that a reload is expected to take, also where nothing is known of it."""
    return in_seconds(candidate.reload) or UNKNOWN_LOAD_S
