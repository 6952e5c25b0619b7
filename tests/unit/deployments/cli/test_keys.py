"""`arbiter key`: the file is changed, and what is printed can be used."""

import json
from pathlib import Path

import pytest

from deployments.front.access.keys import Keyring, Scope
from tests.support.command_line import Run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


@pytest.mark.spec("L1")
def test_a_key_is_made_listed_and_removed(run: Run, path: Path) -> None:
    file = ("--keys", str(path))
    made = run(
        "key", "add", "ann", "--tenant", "acme", "--scope", "infer", "--scope", "lease", *file
    )
    token = made.stdout.strip()
    assert made.exit_code == 0 and "not shown again" in made.stderr
    caller = Keyring(path).caller(token)
    assert caller is not None
    assert (caller.tenant, caller.scopes) == ("acme", {Scope.INFER, Scope.LEASE})
    [row] = json.loads(run("key", "list", "--json", *file).stdout)
    assert (row["name"], row["tenant"], row["scopes"]) == ("ann", "acme", ["infer", "lease"])
    head, line = run("key", "list", *file).stdout.splitlines()
    assert head.split() == ["id", "name", "tenant", "scopes", "created"]
    assert line.split() == [row["id"], "ann", "acme", "infer,lease", row["created"]]
    assert token.split("-", 2)[2] not in line
    assert run("key", "remove", row["id"], *file).stdout == f"removed {row['id']}\n"
    assert Keyring(path).caller(token) is None
    failed = run("key", "remove", row["id"], *file)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"arbiter key: no key '{row['id']}'")


@pytest.mark.spec("L1")
def test_a_key_for_programs_is_one_value(run: Run, path: Path) -> None:
    done = run("key", "add", "ann", "--json", "--keys", str(path))
    assert done.stderr == ""
    caller = Keyring(path).caller(json.loads(done.stdout)["key"])
    assert caller is not None and (caller.tenant, caller.scopes) == ("default", {Scope.INFER})
    key_id = json.loads(done.stdout)["key"].split("-")[1]
    removed = run("key", "remove", key_id, "--json", "--keys", str(path))
    assert json.loads(removed.stdout) == {"removed": key_id}


def test_the_file_is_beside_the_arbiters_state_by_default(run: Run, owner: str) -> None:
    [row] = json.loads(run("key", "list", "--json").stdout)
    assert row["name"] == "first start"


def test_an_unknown_scope_is_named_with_those_there_are(run: Run, path: Path) -> None:
    failed = run("key", "add", "ann", "--scope", "root", "--keys", str(path), COLUMNS="200")
    assert failed.exit_code == 2
    assert f"no scope 'root'; there is: {', '.join(Scope)}" in failed.stderr
    assert not path.exists()


def test_the_help_names_every_scope(run: Run) -> None:
    said = " ".join(run("key", "add", "--help", COLUMNS="200").stdout.split())
    assert all(scope.value in said for scope in Scope)


def test_a_broken_file_is_told_in_words(run: Run, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")
    path.chmod(0o600)
    for words in (("list",), ("add", "ann"), ("remove", "x")):
        failed = run("key", *words, "--keys", str(path))
        assert failed.exit_code == 1 and str(path) in failed.stderr
