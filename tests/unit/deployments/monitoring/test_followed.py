"""What a viewer makes of a stream that is not of its version."""

import pytest

from deployments.monitoring.followed import FollowedStream


@pytest.mark.spec("K4")
def test_events_of_another_version_are_told_as_such() -> None:
    with pytest.raises(ValueError, match="the front's events are of another version"):
        FollowedStream().take({"events": [{"seq": "one"}]})
