"""Adapters in folders that cannot be read: one error, whichever process looks into them."""

import errno
import os
from pathlib import Path

import pytest

from arbiter.errors import RequestError
from deployments.adapters.catalogue import Catalogue
from deployments.adapters.safe_files import AdapterInvalid, AdaptersAway
from deployments.adapters.store import EngineCatalogue, Store
from deployments.config.schema import parse_table
from deployments.front.inference.model_names import ModelNames
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES
from tests.support.hung_folders import failing_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def front_of(folder: Path) -> ModelNames:
    models = {"chat": {"source": "x", "adapters": {"folder": str(folder)}}}
    text = {"role": "text", "engine": "vllm", "models": models}
    return ModelNames(parse_table({"capabilities": {"text": text}}))


def engine_of(folder: Path) -> EngineCatalogue:
    section = {"folder": str(folder), "store": str(folder / "store"), "urls": ()}
    return EngineCatalogue({"model": "chat", "adapters": section})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "adapters" / "law", SHAPES)
    write(tmp_path / "adapters" / "tax", SHAPES)
    return tmp_path / "adapters"


@pytest.mark.spec("F2", "L3")
@pytest.mark.parametrize("name", ["law", "chat:law"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
async def test_folder_that_cannot_be_read_is_one_error_at_front_replica_and_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    failing_folder(monkeypatch, folder / "law", number)
    for look in (front_of(folder).find, engine_of(folder).find):
        with pytest.raises(AdaptersAway, match=os.strerror(number)) as refused:
            await look(name, "")
        assert (refused.value.status_code, refused.value.code) == (503, "adapters_away")
        assert refused.value.retry_after_s
    others = await engine_of(folder).entries(["chat:law", "chat:tax"], "")
    assert [entry.name for entry in others] == ["tax"]


@pytest.mark.spec("F2", "L3")
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, AdaptersAway), (errno.EACCES, AdapterInvalid)]
)
def test_file_that_cannot_be_read_is_the_owners_fault_where_its_mode_forbids_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[RequestError],
) -> None:
    catalogue, store = Catalogue({"chat": folder}), Store(tmp_path / "store")
    law = catalogue.find("law")
    assert law is not None
    (folder / "remote.json").write_text("{}")
    opened = os.open

    def opens(path: str | Path, *args: int, **more: int) -> int:
        if path in (CONFIG, WEIGHTS, "remote.json"):
            raise OSError(number, os.strerror(number), path)
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", opens)
    with pytest.raises(kind, match=f"{CONFIG}: {os.strerror(number)}"):
        store.publish(law, RULES)
    with pytest.raises(kind, match=f"{CONFIG}: {os.strerror(number)}"):
        catalogue.find("tax")
    with pytest.raises(kind, match=rf"remote\.json: {os.strerror(number)}"):
        catalogue.find("chat:other")
    assert catalogue.find("other") is None, "a bare name may be of another base"
    assert [entry.name for entry in catalogue.entries(["law", "tax"])] == ["law"]


@pytest.mark.spec("F3")
async def test_entry_that_cannot_be_read_now_is_not_outdated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    law, tax = await engine.find("law", ""), await engine.find("tax", "")
    assert law is not None and tax is not None
    write(folder / "tax", SHAPES, rank=4)
    failing_folder(monkeypatch, folder / "law", errno.EIO)
    assert await engine.outdated({"law": law, "tax": tax}) == ["tax"]
