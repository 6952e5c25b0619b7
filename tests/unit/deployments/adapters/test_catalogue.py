"""Adapters are found by name in a folder that changes while it is served."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deployments.adapters import catalogue as catalogue_module
from deployments.adapters.catalogue import AdapterAmbiguous, Catalogue
from deployments.adapters.safe_files import AdapterInvalid


def put(folder: Path, rank: int = 8, **extras: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 10)
    if extras:
        (folder / "serve.json").write_text(json.dumps(extras))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "chat" / "legal", 16, priority="high", pin=True)
    put(tmp_path / "chat" / "both")
    put(tmp_path / "other" / "both")
    put(tmp_path / "chat" / "@acme" / "secret")
    put(tmp_path / "chat" / "@acme" / "legal", 4)
    return tmp_path


@pytest.fixture
def catalogue(root: Path) -> Catalogue:
    return Catalogue({"chat": root / "chat", "other": root / "other"}, frozenset({"embed"}))


@pytest.mark.spec("F2")
def test_an_adapter_is_found_by_its_bare_and_its_full_name(catalogue: Catalogue) -> None:
    bare, full = catalogue.find("legal"), catalogue.find("chat:legal")
    assert bare == full and bare is not None
    facts = (bare.base, bare.rank, bare.size_bytes, bare.priority, bare.pin, bare.tenant)
    assert facts == ("chat", 16, 10, "high", True, "")


@pytest.mark.spec("F2")
def test_dropped_adapter_is_found_and_a_removed_one_is_not(
    catalogue: Catalogue, root: Path
) -> None:
    assert "chat:new" not in catalogue.names() and catalogue.find("new") is None
    new = put(root / "chat" / "new")
    assert "chat:new" in catalogue.names()
    assert catalogue.find("new") is not None
    new.rename(root / "elsewhere")
    assert "chat:new" not in catalogue.names() and catalogue.find("new") is None


@pytest.mark.spec("F2")
def test_adapter_of_a_tenant_is_hidden_from_other_tenants(catalogue: Catalogue) -> None:
    assert catalogue.find("secret") is None and catalogue.find("secret", "other") is None
    assert "chat:secret" not in catalogue.names("other")
    assert catalogue.find("chat:secret", "acme") is not None
    assert "chat:secret" in catalogue.names("acme")


@pytest.mark.spec("F2")
def test_adapter_of_a_tenant_hides_the_common_one_of_that_name(catalogue: Catalogue) -> None:
    mine, common = catalogue.find("legal", "acme"), catalogue.find("legal")
    assert mine is not None and common is not None
    assert (mine.rank, common.rank) == (4, 16)


@pytest.mark.spec("F2")
def test_a_name_of_two_bases_must_be_written_in_full(catalogue: Catalogue) -> None:
    with pytest.raises(AdapterAmbiguous, match="chat:both, other:both"):
        catalogue.find("both")
    adapter = catalogue.find("other:both")
    assert adapter is not None and adapter.base == "other"


@pytest.mark.spec("F2")
def test_an_adapter_never_has_a_base_models_name(catalogue: Catalogue, root: Path) -> None:
    put(root / "chat" / "embed")
    assert catalogue.find("embed") is None and "chat:embed" not in catalogue.names()


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    "name", ["../other/both", "chat:../other/both", "/etc", ".", "..", "@acme", "a/b", ":legal", ""]
)
def test_a_name_cannot_leave_its_folder(catalogue: Catalogue, name: str) -> None:
    assert catalogue.find(name) is None
    assert catalogue.find("secret", tenant=f"acme/{name}") is None


@pytest.mark.spec("L2")
def test_a_link_out_of_the_folder_is_not_followed(catalogue: Catalogue, root: Path) -> None:
    outside = put(root / "outside")
    (root / "chat" / "escape").symlink_to(outside)
    assert catalogue.find("escape") is None and "chat:escape" not in catalogue.names()


@pytest.mark.spec("F2", "L2")
def test_link_to_an_adapter_of_another_tenant_is_not_found(
    catalogue: Catalogue, root: Path
) -> None:
    (root / "chat" / "@other").mkdir()
    (root / "chat" / "@other" / "mine").symlink_to("../@acme/secret")
    (root / "chat" / "@whole").symlink_to("@acme")
    (root / "chat" / "@acme" / "shortcut").symlink_to("secret")
    for name, tenant in (("mine", "other"), ("secret", "whole"), ("shortcut", "acme")):
        assert catalogue.find(name, tenant) is None
        assert f"chat:{name}" not in catalogue.names(tenant)


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "serve.json"])
def test_a_file_that_is_a_link_or_a_pipe_is_refused_at_once(
    catalogue: Catalogue, root: Path, file: str
) -> None:
    put(root / "chat" / "other-one")
    (root / "chat" / "other-one" / "serve.json").write_text("{}")
    place = root / "chat" / "legal" / file
    place.unlink()
    place.symlink_to(root / "chat" / "other-one" / file)
    with pytest.raises(AdapterInvalid, match="symbolic links"):
        catalogue.find("legal")
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(AdapterInvalid, match="not a plain file"):
        catalogue.find("legal")


def test_a_replaced_adapter_is_read_again(catalogue: Catalogue, root: Path) -> None:
    first = catalogue.find("legal")
    config = root / "chat" / "legal" / "adapter_config.json"
    config.write_text(json.dumps({"r": 32}))
    os.utime(config, ns=(1, 1))
    second = catalogue.find("legal")
    assert first is not None and second is not None
    assert (first.rank, second.rank) == (16, 32)


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("adapter_config.json", "{", "not JSON"),
        ("adapter_config.json", "[]", "not an object"),
        ("adapter_config.json", '{"r": true}', "not a rank"),
        ("adapter_config.json", '{"r": 0}', "not a rank"),
        ("adapter_config.json", " " * (1 << 19), "larger"),
        ("serve.json", '{"priority": "now"}', "one of urgent"),
        ("serve.json", '{"pin": 1}', "true or false"),
    ],
)
def test_a_bad_entry_says_what_is_wrong(
    catalogue: Catalogue, root: Path, file: str, text: str, word: str
) -> None:
    (root / "chat" / "legal" / file).write_text(text)
    with pytest.raises(AdapterInvalid, match=word):
        catalogue.find("legal")
    (root / "chat" / "legal" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterInvalid, match=r"No such file|cannot be served"):
        catalogue.find("legal")


@pytest.mark.spec("F2")
def test_ten_thousand_adapters_are_listed_and_found(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"a{number}").mkdir()
    put(tmp_path / "the-one")
    catalogue = Catalogue({"chat": tmp_path})
    assert len(catalogue.names()) == 10_001
    listed = catalogue._listings[tmp_path.resolve()]
    assert len(catalogue.names()) == 10_001
    assert catalogue._listings[tmp_path.resolve()] is listed, "not listed again"
    adapter = catalogue.find("the-one")
    assert adapter is not None and adapter.path == tmp_path / "the-one"


@pytest.mark.spec("F2")
def test_ten_thousand_remote_adapters_are_listed_and_found(tmp_path: Path) -> None:
    rows = {f"a{number}": f"s3://ours/a{number}/" for number in range(10_000)}
    (tmp_path / "remote.json").write_text(json.dumps(rows))
    catalogue = Catalogue({"chat": tmp_path}, urls={"chat": ("s3://ours/",)}, fetched=tmp_path)
    assert len(catalogue.names()) == 10_000
    adapter = catalogue.find("chat:a9999")
    assert adapter is not None and adapter.url == "s3://ours/a9999/"
    del rows["a9999"]
    (tmp_path / "new").write_text(json.dumps(rows))
    (tmp_path / "new").rename(tmp_path / "remote.json")
    assert catalogue.find("a9999") is None, "removed a moment ago"


@pytest.mark.spec("L3")
def test_a_broken_manifest_is_read_once_until_it_changes(
    catalogue: Catalogue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    reads = catalogue_module.read_json

    def counted(name: str, file: Path, *bound: int) -> dict[str, Any]:
        read.append(file.name)
        return reads(name, file, *bound)

    monkeypatch.setattr(catalogue_module, "read_json", counted)
    (root / "chat" / "remote.json").write_text("{")
    for _ in range(2):
        with pytest.raises(AdapterInvalid, match=r"remote\.json is not JSON"):
            catalogue.find("chat:far")
    assert read == ["remote.json"]
    (root / "chat" / "remote.json").write_text("{} ")
    assert catalogue.find("chat:far") is None and len(read) == 2


@pytest.mark.spec("L3")
def test_a_broken_manifest_of_one_base_stops_no_bare_name_of_another(
    catalogue: Catalogue, root: Path
) -> None:
    put(root / "other" / "mine")
    (root / "chat" / "remote.json").write_text("{")
    adapter = catalogue.find("mine")
    assert adapter is not None and adapter.base == "other"
    assert catalogue.find("unknown") is None
    assert catalogue.find("legal") is not None, "its folder needs no manifest"


@pytest.mark.spec("L3")
def test_a_tenants_broken_manifest_is_told_to_a_bare_name_that_it_may_hide(
    catalogue: Catalogue, root: Path
) -> None:
    (root / "chat" / "@beta").mkdir()
    (root / "chat" / "@beta" / "remote.json").write_text("{")
    with pytest.raises(AdapterInvalid, match=r"remote\.json is not JSON"):
        catalogue.find("legal", "beta")
    assert catalogue.find("legal", "gamma") is not None
    assert catalogue.find("unknown", "beta") is None


@pytest.mark.spec("L3")
@pytest.mark.parametrize("row", [[{}] * 9, {"url": [{}]}, {"note": "s3://ours/far/"}, 7, None])
def test_a_row_that_can_be_no_adapter_is_refused_by_name_and_not_kept(
    tmp_path: Path, row: Any
) -> None:
    near = {"url": "s3://ours/near/", "pin": True, "note": ["of", "its", "owner"]}
    (tmp_path / "remote.json").write_text(json.dumps({"far": row, "near": near, "../x": ""}))
    catalogue = Catalogue({"chat": tmp_path}, urls={"chat": ("s3://ours/",)}, fetched=tmp_path)
    with pytest.raises(AdapterInvalid, match=r"'far'.* is no URL and no object"):
        catalogue.find("chat:far")
    adapter = catalogue.find("near")
    assert adapter is not None and adapter.pin
    [kept] = catalogue._manifests.values()
    assert kept.rows["near"] == {"url": "s3://ours/near/", "pin": True}
    assert not any(isinstance(each, list | dict) for each in kept.rows["far"].values())
    assert kept.rows.keys() == {"far", "near"}


@pytest.mark.spec("L3")
def test_a_tenants_manifest_is_bounded_below_the_common_one(tmp_path: Path) -> None:
    rows = {f"a{number}": "s3://ours/a/" for number in range(50_000)}
    (tmp_path / "@acme").mkdir()
    for home in (tmp_path, tmp_path / "@acme"):
        (home / "remote.json").write_text(json.dumps(rows))
    catalogue = Catalogue({"chat": tmp_path}, urls={"chat": ("s3://ours/",)}, fetched=tmp_path)
    assert catalogue.find("chat:a7") is not None
    with pytest.raises(AdapterInvalid, match="larger than 1048576 bytes"):
        catalogue.find("chat:a7", "acme")


@pytest.mark.spec("L3")
def test_a_manifest_of_too_many_names_is_refused_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "MAX_NAMES", 3)
    (tmp_path / "remote.json").write_text(json.dumps(dict.fromkeys("abcd", "s3://ours/a/")))
    catalogue = Catalogue({"chat": tmp_path}, urls={"chat": ("s3://ours/",)}, fetched=tmp_path)
    with pytest.raises(AdapterInvalid, match="4 names; leave 3 at most"):
        catalogue.find("chat:a")


@pytest.mark.spec("L3")
def test_what_is_remembered_of_adapters_that_are_renamed_without_end_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "MAX_READ", 3)
    catalogue, law = Catalogue({"chat": tmp_path}), put(tmp_path / "law")
    for number in range(10):
        law = law.rename(tmp_path / f"law-{number}")
        adapter = catalogue.find(law.name)
        assert adapter is not None and adapter.path == law
        assert catalogue.find(law.name) is adapter, "it is remembered"
        assert len(catalogue._read) <= 3


@pytest.mark.spec("L3")
def test_nothing_is_remembered_of_a_folder_that_has_left(tmp_path: Path) -> None:
    catalogue = Catalogue({"chat": tmp_path}, urls={"chat": ("s3://ours/",)}, fetched=tmp_path)
    put(tmp_path / "@acme" / "law")
    (tmp_path / "@acme" / "remote.json").write_text(json.dumps({"far": "s3://ours/far/"}))
    assert catalogue.names("acme") == ["chat:far", "chat:law"]
    (tmp_path / "@acme").rename(tmp_path / "@other")
    assert catalogue.names("acme") == []
    assert not catalogue._manifests and catalogue._listings.keys() == {tmp_path}
