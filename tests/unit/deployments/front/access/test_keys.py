"""Keys are kept as hashes and compared as such; what needs one stays off without it."""

import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from deployments.front.access import keys
from deployments.front.access.auth import Authenticator, Denied
from deployments.front.access.keys import Keyring, Scope

ALL = frozenset(Scope)


def request(token: str = "", **headers: str) -> Request:
    given = {"host": "localhost:8000", **headers}
    if token:
        given["authorization"] = f"Bearer {token}"
    raw = [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in given.items()]
    return Request({"type": "http", "headers": raw, "client": ("127.0.0.1", 1)})


def refusal(gate: Authenticator, asked: Request, scope: Scope) -> tuple[int, Any]:
    with pytest.raises(Denied) as caught:
        gate.require(asked, scope)
    return caught.value.status_code, caught.value.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


@pytest.mark.spec("L1")
def test_no_secret_is_on_disk_and_the_files_are_the_owners(path: Path) -> None:
    keys.ensure_first(path)
    token = keys.add(path, "ann", "acme", ALL)
    first = keys.first_key_path(path).read_text().strip()
    for secret in (token, first):
        assert secret[-20:] not in path.read_text()  # its random part may hold any dash
    for file in (path, keys.first_key_path(path)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.spec("L1")
def test_the_first_start_makes_one_key_with_every_scope_but_cloud_and_no_second(path: Path) -> None:
    keys.ensure_first(path)
    token = keys.first_key_path(path).read_text().strip()
    keys.ensure_first(path)
    assert keys.first_key_path(path).read_text().strip() == token
    gate = Authenticator(Keyring(path))
    assert gate.require(request(token), Scope.ADMIN).scopes == ALL - {Scope.CLOUD}


@pytest.mark.spec("L1")
@pytest.mark.parametrize("scope", [Scope.ADMIN, Scope.LEASE, Scope.PRIORITY])
def test_scopes_that_need_a_key_are_refused_without_one(path: Path, scope: Scope) -> None:
    """Also where nobody has made a key yet, and from whatever address."""
    gate = Authenticator(Keyring(path))
    assert refusal(gate, request(), scope) == (401, "invalid_api_key")
    assert refusal(gate, request(x_forwarded_for="127.0.0.1"), scope)[0] == 401
    assert refusal(gate, request("none"), scope)[0] == 401


@pytest.mark.spec("L1")
def test_inference_asks_for_no_key_until_one_is_added_and_for_one_ever_after(path: Path) -> None:
    keys.ensure_first(path)
    gate = Authenticator(Keyring(path))
    assert gate.require(request("none"), Scope.INFER).tenant == "default"
    token = keys.add(path, "ann", "acme", frozenset({Scope.INFER}))
    assert refusal(gate, request(), Scope.INFER) == (401, "invalid_api_key")
    assert gate.require(request(token), Scope.INFER).tenant == "acme"
    keys.remove(path, token.split("-")[1])
    assert refusal(gate, request(token), Scope.INFER)[0] == 401
    assert refusal(gate, request(), Scope.INFER)[0] == 401


@pytest.mark.spec("L1")
def test_a_key_does_what_its_scopes_say_and_nothing_else(path: Path) -> None:
    token = keys.add(path, "ann", "acme", frozenset({Scope.LEASE}))
    gate = Authenticator(Keyring(path))
    assert gate.require(request(token), Scope.LEASE).tenant == "acme"
    for scope in ALL - {Scope.LEASE}:
        assert refusal(gate, request(token), scope) == (403, "scope_missing")


@given(st.text(st.characters(max_codepoint=255), max_size=120))
def test_no_other_text_is_a_key(token: str) -> None:
    ring = Keyring(Path("/nonexistent/keys.json"))
    assert ring.caller(token) is None


def test_the_right_id_with_a_wrong_secret_is_no_key(path: Path) -> None:
    token = keys.add(path, "ann", "acme", ALL)
    wrong = token[:-1] + ("A" if token[-1] != "A" else "B")
    assert Keyring(path).caller(wrong) is None
    assert Keyring(path).caller(token) is not None


@pytest.mark.parametrize("content", ["", "{", '[{"id": 7}]', "[1]"])
def test_broken_keys_file_refuses_every_request(path: Path, content: str) -> None:
    keys.ensure_first(path)
    path.write_text(content)
    gate = Authenticator(Keyring(path))
    assert refusal(gate, request(), Scope.INFER) == (503, "keys_unreadable")
    assert refusal(gate, request("none"), Scope.ADMIN)[0] == 503


def test_keys_file_writable_by_others_refuses_every_request(path: Path) -> None:
    keys.ensure_first(path)
    path.chmod(0o666)
    assert refusal(Authenticator(Keyring(path)), request(), Scope.INFER)[0] == 503


@pytest.mark.spec("L1")
def test_keys_file_of_a_wrong_mode_is_used_once_its_mode_is_right(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = keys.add(path, "ann", "acme", ALL)
    gate = Authenticator(Keyring(path))
    path.chmod(0o644)
    assert refusal(gate, request(token), Scope.INFER) == (503, "keys_unreadable")
    path.chmod(0o600)
    assert gate.require(request(token), Scope.INFER).tenant == "acme"
    path.chmod(0o644)
    for _ in range(2):
        assert refusal(gate, request(token), Scope.INFER) == (503, "keys_unreadable")
    assert sum("mode 0600" in record.message for record in caplog.records) == 2, "once each time"


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.spec("L1")
def test_front_without_a_free_descriptor_reads_the_keys_at_the_next_request(path: Path) -> None:
    token = keys.add(path, "ann", "acme", ALL)
    gate = Authenticator(Keyring(path))
    with no_more_files():
        assert refusal(gate, request(token), Scope.INFER) == (503, "keys_unreadable")
    assert gate.require(request(token), Scope.INFER).tenant == "acme"


@pytest.mark.spec("L1")
def test_keys_file_that_cannot_be_looked_up_refuses_each_request_until_it_can(path: Path) -> None:
    token = keys.add(path, "ann", "acme", ALL)
    aside = path.rename(path.with_name("aside"))
    path.symlink_to(path)  # the system gives up: too many levels of symbolic links
    ring = Keyring(path)
    assert refusal(Authenticator(ring), request(token), Scope.INFER) == (503, "keys_unreadable")
    with pytest.raises(keys.KeysBroken, match=str(path)):
        ring.caller(token)
    aside.rename(path)
    assert Authenticator(ring).require(request(token), Scope.INFER).tenant == "acme"


@pytest.mark.spec("L1")
@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "10.1.2.3"}, True),
        ({"host": "box.lan:8000"}, True),
        ({"host": "BOX.lan"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": ""}, False),
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:9000"}, False),
        ({"origin": "https://app.example"}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
    ],
)
def test_only_allowed_hosts_and_origins_may_send_requests(
    headers: dict[str, str], is_let_in: bool
) -> None:
    sites = frozenset({"box.lan"}), frozenset({"https://app.example"})
    gate = Authenticator(Keyring(Path("/nonexistent")), *sites)
    if is_let_in:
        return gate.check_site(request(**headers))
    with pytest.raises(Denied) as caught:
        gate.check_site(request(**headers))
    assert caught.value.status_code == 403


def test_a_tenant_is_a_plain_name(path: Path) -> None:
    with pytest.raises(keys.KeyTrouble, match="tenant"):
        keys.add(path, "ann", "../etc", ALL)
    assert not path.exists()
