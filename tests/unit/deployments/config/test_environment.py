"""Variables that a person sets: read when asked for, and empty ones are not set."""

from pathlib import Path

import pytest

from deployments.config import boot, load_plan
from deployments.config.environment import Environment
from models.make_models import default_folder


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("URL", "KEY", "MODELS", "ADAPTERS", "SLABS"):
        monkeypatch.delenv(f"ARBITER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("is_empty", [True, False])
def test_what_is_not_set_is_as_by_default(
    is_empty: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if is_empty:
        for name in ("URL", "KEY", "MODELS", "ADAPTERS", "SLABS"):
            monkeypatch.setenv(f"ARBITER_{name}", "")
    found = Environment()
    assert (found.url, found.key) == ("http://127.0.0.1:8000", None)
    cache = tmp_path / ".cache" / "serve-arbiter"
    assert (found.models, found.adapters) == (cache / "models", cache / "adapters")
    assert found.slabs == cache / "slabs"


def test_folders_of_models_and_adapters_follow_their_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARBITER_MODELS", "/m")
    monkeypatch.setenv("ARBITER_ADAPTERS", "/a")
    assert load_plan.models_folder() == default_folder() == Path("/m")
    assert load_plan.adapter_store() == Path("/a")


@pytest.mark.spec("G4")
def test_folder_of_saved_slabs_is_the_variables_or_beside_the_state_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARBITER_SLABS", "/s")
    arbiter: dict[str, object] = {"disk_pool": "1 GiB"}
    table = {"arbiter": arbiter, "capabilities": {}}
    agent = boot.read(table).agent
    assert (agent.slabs_folder, agent.disk_bytes) == ("/s", 1 << 30)
    arbiter["state_file"] = "/var/lib/arbiter/arbiter.sqlite"
    assert boot.read(table).agent.slabs_folder == "/var/lib/arbiter/slabs"


def test_a_key_is_not_in_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBITER_KEY", "arb-secret")
    assert "secret" not in repr(Environment())
