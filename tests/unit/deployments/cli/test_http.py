"""What the command sends, to whom, and what it says when that fails."""

import httpx
import pytest

from deployments.cli import http
from tests.support.command_line import Run
from tests.support.ports import free_port
from tests.support.scripted_front import ScriptedFront


@pytest.mark.spec("L1")
def test_the_owners_key_is_sent_to_this_machine_and_no_other(owner: str) -> None:
    for here in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert http.api_key(here) == owner
    for away in ("http://10.0.0.7:8000", "http://gpu-box:8000", "http://localhost.evil.example"):
        assert http.api_key(away) == ""


@pytest.mark.spec("L1")
def test_a_key_given_by_name_goes_wherever_it_is_sent(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBITER_KEY", "arb-mine")
    assert http.api_key("http://gpu-box:8000") == "arb-mine" != owner


@pytest.mark.spec("L1")
def test_the_key_is_a_bearer_token(front: ScriptedFront, run: Run, owner: str) -> None:
    front.says("POST", "/arbiter/models/load/m", {"model": "m"})
    assert run("load", "m").exit_code == 0
    assert run("load", "m", ARBITER_KEY="arb-mine").exit_code == 0
    sent = [request.headers["authorization"] for request in front.requests]
    assert sent == [f"Bearer {owner}", "Bearer arb-mine"]


@pytest.mark.spec("L1")
def test_the_owners_key_goes_through_no_proxy(
    front: ScriptedFront, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []
    plain = httpx.Client

    def client(**options: object) -> httpx.Client:
        opened.append(bool(options["trust_env"]))
        return plain(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(httpx, "Client", client)
    for url in ("http://127.0.0.1:8000", "http://gpu-box:8000"):
        with http.front(url):
            pass
    assert opened == [False, True]


def test_an_option_goes_before_the_environment_and_an_empty_variable_is_none(
    front: ScriptedFront, run: Run
) -> None:
    for words, url in (
        ((), "http://a:1"),
        (("--url", ""), "http://a:1"),  # as of a script whose own variable is empty
        (("--url", "http://b:2/"), "http://b:2"),
    ):
        failed = run("status", *words, ARBITER_URL="http://a:1")
        assert f"GET {url}/arbiter/state was answered (404)" in failed.stderr
    failed = run("status", ARBITER_URL="")
    assert "GET http://127.0.0.1:8000/arbiter/state was answered (404)" in failed.stderr


def test_a_refusal_is_told_in_words(front: ScriptedFront, run: Run) -> None:
    front.says("GET", "/arbiter/settings", {"generation": 3, "settings": {}})
    front.refuses("PUT", "/arbiter/settings", 400, "invalid_request", "bypass_count: at least 0")
    for machine in ((), ("--json",)):
        failed = run("settings", "bypass_count=-1", *machine)
        assert (failed.exit_code, failed.stdout) == (1, "")
        assert failed.stderr == (
            "arbiter settings: PUT http://127.0.0.1:8000/arbiter/settings was refused"
            " (400 invalid_request): bypass_count: at least 0\n"
        )


@pytest.mark.parametrize(
    ("status", "code", "headers", "advice"),
    [
        (401, "invalid_api_key", {}, "ARBITER_KEY"),
        (403, "scope_missing", {}, "arbiter key add NAME --scope"),
        (503, "arbiter_unavailable", {"retry-after": "2"}, "Try again in 2 s"),
    ],
)
def test_a_refusal_says_what_to_do(
    front: ScriptedFront, run: Run, status: int, code: str, headers: dict[str, str], advice: str
) -> None:
    front.refuses("GET", "/arbiter/state", status, code, "no", **headers)
    failed = run("status")
    assert failed.exit_code == 1
    assert f"({status} {code}): no. " in failed.stderr and advice in failed.stderr


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (500, "Internal Server Error", "serve status"),
        (200, "<html>", "Is the address right"),
        (404, '{"detail": "Not Found"}', "Is the address right"),
        (400, '["error"]', "Is the address right"),
        (302, "", "an empty body"),
    ],
)
def test_an_answer_in_another_form_is_quoted(
    run: Run, owner: str, monkeypatch: pytest.MonkeyPatch, status: int, body: str, advice: str
) -> None:
    other = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
    monkeypatch.setattr(http, "transport", lambda: other)
    failed = run("status")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert f"({status})" in failed.stderr and body in failed.stderr and advice in failed.stderr


def test_a_refused_connection_names_the_address_and_what_to_start(run: Run, owner: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    failed = run("status", "--url", url)
    assert failed.exit_code == 1
    assert f"no front answers at {url}" in failed.stderr
    assert "refused" in failed.stderr and "make serve" in failed.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (httpx.ConnectTimeout("t"), "no connection within 5 s"),
        (httpx.ReadTimeout("t"), "no answer within 30 s"),
        (httpx.RemoteProtocolError("Server disconnected"), "Server disconnected"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_a_broken_connection_says_how(
    run: Run, owner: str, monkeypatch: pytest.MonkeyPatch, error: httpx.HTTPError, says: str
) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise error

    monkeypatch.setattr(http, "transport", lambda: httpx.MockTransport(broken))
    for words in (("status",), ("events", "--follow")):
        failed = run(*words)
        assert failed.exit_code == 1
        assert f"({says})" in failed.stderr


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "x"])
def test_an_address_of_another_form_is_refused(run: Run, url: str) -> None:
    failed = run("status", "--url", url)
    assert failed.exit_code == 1
    assert "http://HOST:PORT" in failed.stderr and url in failed.stderr
