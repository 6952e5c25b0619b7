"""What tests of the front share."""

from pathlib import Path

import pytest

from deployments.front import keys


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """With the key of the first start."""
    path = tmp_path / "keys.json"
    keys.ensure_first(path)
    return path
