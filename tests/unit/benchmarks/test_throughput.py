"""What there is to compare without a graph."""

import sys

import pytest

from benchmarks import throughput


def test_an_engine_without_a_graph_has_no_adapters_to_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["throughput", "--transport", "alone", "--adapters", "8"])
    with pytest.raises(SystemExit):
        throughput.main()
    assert "--adapters" in capsys.readouterr().err
