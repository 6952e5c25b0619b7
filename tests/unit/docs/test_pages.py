"""Every block of the documentation that can be pasted is run by a test, or says why it is not."""

import os
import re
import sqlite3
import stat
from pathlib import Path

import pytest
import yaml

from arbiter.server.store import Store
from deployments.front.access import keys
from deployments.front.access.keys import Keyring, Scope
from deployments.front.middleware.body_limit import MAX_FILE_FORM_BYTES
from tests.support.pages import NOT_RUN, PAGES, ROOT, Block, as_checkout, blocks, run, to_paste

ALL = [block for page in PAGES for block in blocks(page)]
LEARNED = {"capability": "chat", "model": "a", "settings_key": "k", "peak_bytes": 7}


def blocks_named(first_line: str) -> list[Block]:
    found = [b for b in ALL if b.text.startswith(first_line)]
    assert found, f"no block begins with {first_line!r}"
    return found


@pytest.mark.spec("M4")
def test_block_that_is_not_run_is_on_a_page_and_has_a_reason() -> None:
    names = {block.name for page in PAGES for block in to_paste(page)}
    assert not NOT_RUN.keys() - names, "gone from the page: take them off the list"
    assert len(names - NOT_RUN.keys()) > 10
    named = {test for reason in NOT_RUN.values() for test in re.findall(r"test_\w+", reason)}
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and all(f"def {test}(" in text for test in named)


@pytest.mark.spec("M4")
def test_block_has_a_language_that_is_known() -> None:
    """So that none is left out because of a misspelt fence."""
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
        assert {*fences[::2]} <= {"", "sh", "python", "yaml", "mermaid"}, page.name
        assert {*fences[1::2]} <= {""} and len(fences) % 2 == 0, page.name
        assert len(blocks(page)) == sum(map(bool, fences)), page.name


@pytest.mark.spec("M4")
def test_yaml_of_the_pages_is_yaml_and_python_is_python() -> None:
    for block in ALL:
        if block.language == "yaml":
            assert yaml.safe_load(block.text), block.name
        elif block.language == "python":
            compile(block.text, block.name, "exec")


@pytest.mark.spec("M4")
def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
            file, _, heading = target.partition("#")
            path = (page.parent / file) if file else page
            assert path.exists(), f"{page.name}: {target}"
            if heading:
                heads = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
                assert heading in {
                    re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads
                }


@pytest.mark.spec("M4")
def test_block_that_fails_fails_its_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing there"):
        run("echo nothing there; false; true", tmp_path, os.environ)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run("1 / 0", tmp_path, os.environ, "python")


@pytest.mark.spec("M3")
def test_proxy_for_tls_lets_through_what_the_front_takes() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert f"client_max_body_size {-(-MAX_FILE_FORM_BYTES >> 20)}m;" in page
    assert "proxy_set_header Host $host;" in page and "proxy_buffering off;" in page


@pytest.mark.spec("M3")
def test_backup_taken_while_it_is_written_brings_back_what_was_learned_and_the_keys(
    tmp_path: Path,
) -> None:
    back_up, restore = blocks_named("STATE=")
    as_checkout(tmp_path)
    home = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    folder = tmp_path / "state" / "serve-arbiter"
    store, file = Store(folder / "arbiter.sqlite", "first"), folder / "keys.json"
    keys.ensure_first(file)
    token = keys.add(file, "ann", "acme", frozenset({Scope.INFER}))
    assert store.save_learned([LEARNED])
    run(back_up.text, tmp_path, home)  # the store is open, and its last row in the log beside it
    assert store.save_learned([LEARNED | {"peak_bytes": 8}])
    store.close()
    for lost in folder.iterdir():
        lost.unlink()
    (folder / "arbiter.sqlite-wal").write_bytes(b"of another file")  # of a crash meanwhile
    run(restore.text, tmp_path, home)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    again = Store(folder / "arbiter.sqlite", "second")
    assert again.learned() == [LEARNED] and again.moved_aside is None
    again.close()
    caller = Keyring(file).caller(token)
    assert caller and (caller.tenant, caller.scopes) == ("acme", {Scope.INFER})
    assert Keyring(file).caller(keys.first_key_path(file).read_text().strip())


def test_backup_is_one_sound_file_that_the_owner_alone_can_read(tmp_path: Path) -> None:
    back_up, _ = blocks_named("STATE=")
    as_checkout(tmp_path)
    folder = tmp_path / "state" / "serve-arbiter"
    store = Store(folder / "arbiter.sqlite", "first")
    keys.ensure_first(folder / "keys.json")
    run(back_up.text, tmp_path, {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")})
    store.close()
    made = tmp_path / "backup"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {p.name for p in made.iterdir()} == {"arbiter.sqlite", "keys.json", "admin.key"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made.iterdir())
    with sqlite3.connect(made / "arbiter.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
