"""Values of a lease beyond all bounds are refused by name."""

import pytest
from pydantic import ValidationError

from arbiter.protocol.lease_schema import LeaseBody

pytestmark = pytest.mark.spec("A15")


@pytest.mark.parametrize("field", ["term_s", "notice_s", "deadline_s", "wait_s"])
@pytest.mark.parametrize("value", ["Infinity", "1e400", "1e308", "NaN"])
def test_a_time_beyond_all_bounds_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ValidationError, match=field):
        LeaseBody.model_validate_json(f'{{"bytes": 1, "{field}": {value}}}')


def test_a_pid_beyond_the_kernels_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="pid"):
        LeaseBody.model_validate_json('{"bytes": 1, "pid": 99999999999}')
