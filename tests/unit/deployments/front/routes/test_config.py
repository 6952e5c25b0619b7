"""The generation that a change of the configuration says."""

import pytest

from deployments.front.inference.request import BadRequest
from deployments.front.routes.config import _generation


@pytest.mark.spec("J5")
@pytest.mark.parametrize("tag", ["9" * 5_000, "9" * 19, "x", "*"])
def test_a_tag_that_is_no_generation_is_refused(tag: str) -> None:
    with pytest.raises(BadRequest, match="If-Match"):
        _generation(None, tag)


def test_a_tag_says_the_generation() -> None:
    assert _generation(None, 'W/"12"') == _generation(12, "12") == 12
