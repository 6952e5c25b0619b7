"""The code on disk is replaced while an arbiter, holders and spare workers of the old code live."""

import shutil
from pathlib import Path

import pytest

from tests.support import own_cluster


@pytest.mark.spec("A20", "M3")
def test_upgrade_to_other_code_leaves_nothing_of_the_old_but_its_holders(tmp_path: Path) -> None:
    for name in ("arbiter", "deployments", "models", "policies", "tests"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(own_cluster.ROOT / name, tmp_path / name, ignore=skipped)
    own_cluster.run("tests.faults.version_upgrade", root=tmp_path)
