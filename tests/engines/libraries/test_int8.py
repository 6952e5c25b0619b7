"""Weights that are rounded to 8 bits once, when an adapter is published (F3)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.adapters.catalogue import Catalogue, CatalogueEntry
from deployments.adapters.int8 import round_weights
from deployments.adapters.safe_files import AdapterInvalid
from deployments.adapters.store import Store
from deployments.adapters.validate import Rules
from tests.support.adapters import write

SHAPES = {"layers.0.q_proj": (12, 8)}
RULES = Rules(SHAPES, max_rank=16)
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.spec("F3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_row_has_at_most_255_values_and_none_is_further_off_than_half_a_step(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(3)
    before = {"a": torch.randn(6, 1000, generator=made), "zero": torch.zeros(2, 5)}
    before = {name: tensor.to(dtype) for name, tensor in before.items()}
    save_file(before, tmp_path / "w")
    size = (tmp_path / "w").stat().st_size
    round_weights(tmp_path / "w")
    after = load_file(tmp_path / "w")
    assert (tmp_path / "w").stat().st_size == size
    assert after["a"].dtype == dtype and not after["zero"].any()
    for old, new in zip(before["a"].double(), after["a"].double(), strict=True):
        step = old.abs().max() / 127
        assert len(new.unique()) <= 255
        rounding = torch.finfo(dtype).eps * old.abs().max()
        assert (old - new).abs().max() <= step / 2 + rounding
        assert (old - new).abs().max() > 0


def entry(folder: Path) -> CatalogueEntry:
    found = Catalogue({"chat": folder.parent}).find(folder.name)
    assert found is not None
    return found


@pytest.mark.spec("F3")
def test_digest_covers_the_rounding_and_the_copy_has_it(tmp_path: Path) -> None:
    source, store = write(tmp_path / "in" / "good", SHAPES), Store(tmp_path / "store")
    plain = store.publish(entry(source), RULES)
    (source / "serve.json").write_text('{"int8": true}')
    rounded = store.publish(entry(source), RULES)
    assert rounded.digest != plain.digest and plain.path.is_dir()
    assert (rounded.path / WEIGHTS).stat().st_mode & 0o222 == 0
    for old, new in zip(
        load_file(plain.path / WEIGHTS).values(),
        load_file(rounded.path / WEIGHTS).values(),
        strict=True,
    ):
        assert 0 < (old - new).abs().max() < 0.01
        assert np.allclose(old.abs().amax(1), new.abs().amax(1), rtol=1e-6)
    (source / "serve.json").unlink()
    assert store.publish(entry(source), RULES).digest == plain.digest


def test_option_is_a_word_of_json(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "good", SHAPES)
    (source / "serve.json").write_text('{"int8": 1}')
    with pytest.raises(AdapterInvalid, match="`int8` true or false"):
        entry(source)
