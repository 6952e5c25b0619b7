"""Policies, capabilities and adapter sources of another package, as CONTRIBUTING.md has them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.core.view import Candidate
from arbiter.units import GIB, Bytes, HolderId, Instant, Span, TicketId
from deployments import app
from deployments.config import boot, runtime_settings
from deployments.config.config_file import CapabilityArgs
from deployments.config.schema import ConfigError, parse_table
from deployments.replica.capability import Capability
from tests.support.adapters import write
from tests.support.contributing import ROOT, addition, package

MINE = "my_package.evict_largest:price"
ONE = Candidate(TicketId("a"), HolderId("h"), 25, Bytes(4 * GIB), 0, Instant(5), Span(0))
FETCH = """
import asyncio, sys
from pathlib import Path
from deployments.adapters.catalogue import Catalogue
from deployments.adapters.fetch import Fetcher
from my_package.vault import Vault

folder, fetched = Path(sys.argv[1]), Path(sys.argv[2])
Vault.root = Path(sys.argv[3])
entry = Catalogue({"chat": folder}, urls={"chat": ("vault://loras/",)}, fetched=fetched).find("law")
bounds = {"adapter_config.json": 1_000, "adapter_model.safetensors": 10_000}
asyncio.run(Fetcher(fetched, bounds).bring(entry))
print((entry.path / "adapter_config.json").read_text())
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`my_package` on the path of this process, for the length of a test."""
    folder = package(tmp_path / "outside")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


@pytest.mark.spec("H9")
@pytest.mark.usefixtures("outside")
def test_policy_of_another_package_is_named_by_its_path() -> None:
    table = parse_table({"arbiter": {"evict": MINE}, "capabilities": {}})
    price = boot.configuration(table).policies.evict(ONE)
    assert (price.rank, price.cost_s) == ((25,), 2**20 / (4 * GIB))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_package.none:price", "No module named"),
        ("policies.evict_time_of_day:none", "no attribute"),
        ("policies:ROLES", "is no function"),
        ("none", "or `module:function`"),
        ("belady", "no eviction policy"),
    ],
)
def test_policy_that_cannot_be_imported_is_refused_by_name(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_table({"arbiter": {"evict": path}, "capabilities": {}})
    assert "arbiter.evict" in str(caught.value) and path in str(caught.value)


@pytest.mark.spec("L1")
async def test_policy_path_is_not_taken_from_a_request() -> None:
    with pytest.raises(ConfigError, match="only serve_config"):
        await runtime_settings.change(0, {"evict": "os:system"})


@pytest.mark.spec("H9")
@pytest.mark.usefixtures("outside")
def test_capability_class_of_another_package_is_named_by_its_row_or_by_an_applications_args() -> (
    None
):
    table = parse_table({"capabilities": addition()["capabilities"]})
    made = app.of_table("echo", table.capabilities["echo"])._bound_deployment.func_or_class
    assert made.__name__ == "Patient"
    [application] = addition()["applications"]
    args = CapabilityArgs.model_validate(application["args"])
    made = app.capability(args)._bound_deployment.func_or_class
    assert made.__name__ == "Patient" and issubclass(made, Capability)
    plain = app.capability(CapabilityArgs(capability="echo"))._bound_deployment.func_or_class
    assert plain is Capability


@pytest.mark.spec("G3")
@pytest.mark.parametrize(("said", "most"), [({}, 1), ({"max_replicas": 3}, 3)])
def test_capability_has_one_replica_unless_its_arguments_say_more(
    said: dict[str, int], most: int
) -> None:
    args = CapabilityArgs.model_validate({"capability": "echo", **said})
    config = app.capability(args)._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (0, most)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none:Patient", "No module named"),
        ("deployments.app:Nothing", "no attribute"),
        ("deployments.app:front", "no subclass of Capability"),
    ],
)
def test_capability_class_that_is_none_is_refused_by_name(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app.capability(CapabilityArgs.model_validate({"capability": "echo", "class": path}))


@pytest.mark.spec("H9", "F2")
def test_adapter_source_of_another_package_is_found_by_its_protocol(
    tmp_path: Path, outside: Path
) -> None:
    """In a process of its own, because fsspec reads entry points when it is imported."""
    vault, folder = tmp_path / "vault", tmp_path / "adapters"
    law = write(vault / "loras" / "law-v3", {"model.layers.0.self_attn.q_proj": (16, 8)})
    folder.mkdir()
    (folder / "remote.json").write_text(json.dumps({"law": "vault://loras/law-v3/"}))
    done = subprocess.run(
        [sys.executable, "-c", FETCH, folder, tmp_path / "fetched", vault],
        env={"PYTHONPATH": f"{ROOT}:{outside}", "PATH": ""},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == (law / "adapter_config.json").read_text(), done.stderr
