"""How values are printed, whatever the command."""

import pytest

from arbiter.units import GIB, MIB
from deployments.cli import output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0.0 s"), (119.9, "119.9 s"), (120.0, "2 min"), (5400, "90 min"),
     (7200, "2.0 h"), (86_400, "24.0 h")],
)  # fmt: skip
def test_a_span_is_said_in_the_unit_that_people_use(seconds: float | None, text: str) -> None:
    assert output.span(seconds) == text


def test_sizes_on_devices_leave_the_node_out() -> None:
    assert output.sizes({"n1/cpu:0": GIB, "n1/host": 300 * MIB}) == "cpu:0 1.0 GiB, host 300.0 MiB"


def test_a_value_that_is_not_there_is_a_dash_and_a_truth_is_a_word() -> None:
    assert [output.cell(v).plain for v in (None, "", 0, True, False)] == [
        "-",
        "-",
        "0",
        "yes",
        "no",
    ]


def test_what_takes_seconds_is_shown_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with output.working("joining the cluster") as now:
        now("replacing the arbiter")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with output.working("joining the cluster"):
        pass
    out, errors = capsys.readouterr()
    assert out == "" and "joining the cluster" in errors


def test_a_long_row_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a" * 3_000, "b")]
    output.show(False, None, output.table(("first", "second"), rows))
    assert capsys.readouterr().out.splitlines()[1] == f"{'a' * 3_000}  b"
