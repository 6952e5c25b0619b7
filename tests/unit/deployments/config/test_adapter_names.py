"""The base of an adapter's full name."""

import pytest

from deployments.config.adapter_names import bare_of, base_of, full_name, is_full
from deployments.config.model_section import check_name

pytestmark = pytest.mark.spec("F2")


@pytest.mark.parametrize(
    ("name", "base", "bare"),
    [("chat", "chat", "chat"), ("chat:law", "chat", "law"), ("org/chat:law", "org/chat", "law")],
)
def test_full_name_has_its_base_before_the_colon(name: str, base: str, bare: str) -> None:
    assert (base_of(name), bare_of(name)) == (base, bare)
    assert is_full(name) == (name == full_name(base, bare))


def test_name_of_a_model_is_no_full_name_of_an_adapter() -> None:
    with pytest.raises(ValueError, match="model name 'chat:law'"):
        check_name(full_name("chat", "law"))
