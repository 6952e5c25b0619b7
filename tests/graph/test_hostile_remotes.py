"""Remotes that mean harm, asked by the running system: each request ends within its bounds with a
typed error, and no other request is harmed."""

import copy
import json
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme
from anyio.from_thread import start_blocking_portal
from openai import APIError, APIStatusError, OpenAI

from deployments.front.access import keys
from tests.graph.conftest import HUB_TOKEN, REMOTE_KEY, Graph, until
from tests.support.graph_processes import logs_naming
from tests.support.graph_remotes import CLOUD, HELLO, all_events, client_of, egress, owner_reads
from tests.support.graph_tasks import TINY, tasks
from tests.support.hostile_remotes import (
    EVENT,
    JSON,
    OK,
    SSE,
    drips,
    forever,
    hangs,
    listening,
    resets,
    says,
)
from tests.support.remote_server import GoodRemote, good_remote

BOUNDS = {"connect_s": 2.0, "head_s": 1.0, "idle_s": 1.0, "total_s": 4.0, "answer_bytes": 1 << 20}
ENDS_S = 30.0  # of a request that may take 4 s
REDIRECT = b"HTTP/1.1 307 there\r\nlocation: http://127.0.0.1:%d/v1\r\ncontent-length: 0\r\n\r\n"
FAILED = b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n"
KEY_REFUSED = b"HTTP/1.1 401 no\r\ncontent-length: 0\r\n\r\n"

# By the remote's name: what becomes of a request, and after how many of them it is left alone.
KINDS = {
    "redirects": ("protocol", 1),
    "no-json": ("protocol", 1),
    "silent": ("timeout", 3),
    "resets": ("broken", 3),
    "fails": ("server", 3),
    "slow": ("timeout", 3),
    "refuses-the-key": ("key", 1),
    "forged": ("certificate", 1),
    "within": ("connect", 3),
}
# The same, of a stream that has begun.
STREAMS = {"breaks": "broken", "endless-events": "size"}
SECRETS = [r"ACME-\d{4}", r"(z|zz)+$"]  # the second takes for ever over many z
FILE_KEY = "key-of-a-remote-of-a-file"
KEYED = {"keyed-by-variable": REMOTE_KEY[1], "keyed-by-file": FILE_KEY}


@pytest.fixture(scope="module")
def seen() -> list[str]:
    """Requests that a redirect led on."""
    return []


@pytest.fixture(scope="module")
def hostile(graph: Graph, seen: list[str]) -> Iterator[None]:
    """The running system with a remote of each kind, and its own table again."""
    certified = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(certified)

    async def led_on(*_: Any) -> None:
        seen.append("led on")

    with listening({"led-on": (led_on, None)}) as there:
        answers = {
            "redirects": (says(REDIRECT % there["led-on"]), None),
            "endless": (forever(b" " * 1_000, JSON + b"\r\n"), None),
            "no-json": (says(OK + b"text/html\r\n\r\n<html>"), None),
            "silent": (hangs(), None),
            "resets": (resets(JSON + b"content-length: 99\r\n\r\n{"), None),
            "fails": (says(FAILED), None),
            "slow": (drips, None),
            "refuses-the-key": (says(KEY_REFUSED), None),
            **{name: (says(KEY_REFUSED), None) for name in KEYED},
            "forged": (says(JSON + b"\r\n{}"), certified),
            "within": (says(JSON + b"\r\n{}"), certified),
            "breaks": (resets(SSE + b"\r\n" + EVENT), None),
            "endless-events": (forever(EVENT, SSE + b"\r\n"), None),
        }
        with listening(answers) as ports:
            config = copy.deepcopy(graph.config)
            table = config["applications"][0]["deployments"][0]["user_config"]
            rows = {name: row(name, port) for name, port in ports.items()}
            rows["keyed-by-variable"]["key_env"] = REMOTE_KEY[0]
            rows["keyed-by-file"]["key_file"] = str(key_file(graph))
            table["remotes"]["rows"] |= rows
            table["remotes"]["secrets"] = SECRETS
            try:
                deploy(graph, config, "breaks")
                yield
            finally:
                deploy(graph, graph.config, "elsewhere")


def key_file(graph: Graph) -> Path:
    path = graph.folder / "hostile.key"
    path.touch(0o600)
    path.write_text(FILE_KEY)
    return path


def row(name: str, port: int) -> dict[str, Any]:
    """Of a private address, which is allowed to all but one."""
    scheme = "https" if name in ("forged", "within") else "http"
    return {
        "url": f"{scheme}://127.0.0.1:{port}/v1",
        "private_addresses": name != "within",
        "budget": {"tokens": 1_000_000},
        "models": {f"{name}-chat": {"name": "any", "answer_tokens": 10}},
        "bounds": BOUNDS,
    }


def remotes(graph: Graph) -> dict[str, Any]:
    told = json.loads(owner_reads(graph, "/arbiter/remotes"))
    return {each["remote"]: each for each in told["remotes"]}


def deploy(graph: Graph, config: dict[str, Any], last: str) -> None:
    """Returns once the front has the table. `last`: the remote that stands last in it."""
    rows = config["applications"][0]["deployments"][0]["user_config"]["remotes"]["rows"]
    assert last in rows
    graph.deploy(config)
    until(lambda: remotes(graph).keys() == rows.keys(), 60, "the front has the table")


@pytest.fixture
def bea(graph: Graph, keys_file: Path) -> OpenAI:
    """Her key has the scope `cloud`."""
    return client_of(graph, keys.add(keys_file, "bea", "bea", CLOUD))


def refusal(bea: OpenAI, model: str, **more: Any) -> APIStatusError:
    with pytest.raises(APIStatusError) as refused:
        bea.chat.completions.create(model=model, messages=HELLO, max_tokens=4, **more)
    return refused.value


@pytest.mark.spec("J5")
@pytest.mark.parametrize("name", KINDS)
def test_hostile_remote_ends_in_a_typed_error_is_left_alone_and_harms_no_other(
    graph: Graph, hostile: None, bea: OpenAI, seen: list[str], name: str
) -> None:
    kind, patience = KINDS[name]
    last = egress(graph)[-1]["seq"] if egress(graph) else 0
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(
            bea.chat.completions.create, model="plain-chat", messages=HELLO, max_tokens=4
        )
        for _ in range(patience):
            began_s = time.monotonic()
            refused = refusal(bea, f"{name}-chat")
            assert (refused.status_code, refused.code) == (502, "remote_failed"), refused
            assert time.monotonic() - began_s < ENDS_S
        assert beside.result(60).choices[0].message.content
    shown = remotes(graph)[name]
    assert (shown["cause"], shown["in_flight"]) == (kind, 0) and shown["cools_down_s"] > 0
    refused = refusal(bea, f"{name}-chat")
    assert (refused.status_code, refused.code) == (503, "remote_cooling_down")
    assert 0 < int(refused.response.headers["retry-after"]) <= 300

    def outcomes() -> list[str]:
        """As they are written down, of this remote."""
        return [
            event["outcome"]
            for event in egress(graph)
            if event["seq"] > last and event["remote"] == name and "outcome" in event
        ]

    until(lambda: len(outcomes()) == patience, 60, "each end is written down")
    assert outcomes() == [kind] * patience
    sample = f'arbiter_remote_answers_total{{outcome="{kind}",remote="{name}"}}'
    until(lambda: sample in owner_reads(graph, "/metrics").decode(), 60, "a scrape has them")
    assert not seen, "a redirect was followed"


@pytest.mark.spec("J5", "L3")
def test_answers_above_their_bound_are_errors_of_their_own_requests(
    graph: Graph, hostile: None, bea: OpenAI
) -> None:
    for _ in range(2):
        refused = refusal(bea, "endless-chat")
        assert (refused.status_code, refused.code) == (502, "remote_failed"), refused
        assert f"larger than {BOUNDS['answer_bytes']} bytes" in refused.message
    shown = remotes(graph)["endless"]
    assert (shown["cause"], shown["in_flight"], shown["cools_down_s"]) == (None, 0, 0)


@pytest.mark.spec("J5")
@pytest.mark.parametrize("name", STREAMS)
def test_stream_of_a_remote_that_breaks_ends_with_an_error_and_is_not_begun_again(
    graph: Graph, hostile: None, bea: OpenAI, name: str
) -> None:
    last = egress(graph)[-1]["seq"] if egress(graph) else 0
    stream = bea.chat.completions.create(
        model=f"{name}-chat", messages=HELLO, max_tokens=4, stream=True
    )
    pieces = []
    with pytest.raises(Exception, match="did not answer"):
        for chunk in stream:
            pieces.append(chunk.choices[0].delta.content)
    assert set(pieces) == {"a"} and (name != "breaks" or len(pieces) == 1)

    def begun() -> list[dict[str, Any]]:
        new = [event for event in egress(graph) if event["seq"] > last]
        return [event for event in new if event["remote"] == name and "outcome" in event]

    ends = until(begun, 60, "its end is written down")
    assert [end["outcome"] for end in ends] == [STREAMS[name]]
    assert ends[0]["size_bytes"] <= BOUNDS["answer_bytes"] + 1


@pytest.mark.spec("J5")
def test_ladder_goes_no_further_once_its_remote_has_said_a_token(
    graph: Graph, hostile: None, bea: OpenAI
) -> None:
    last = all_events(graph)[-1]["seq"]
    ladder = {"ladder": ["breaks-chat", TINY], "pin_primary": True}
    with tasks(graph, far=ladder):
        said = bea.chat.completions.with_raw_response.create(
            model="task:far", messages=HELLO, max_tokens=4, stream=True
        )
        assert said.headers["x-arbiter-served-by"] == "breaks/any"
        words = []
        with pytest.raises(APIError) as broken:
            for chunk in said.parse():
                words.append(chunk.choices[0].delta.content)
    assert (words, broken.value.code) == (["a"], "remote_failed")
    here = bea.chat.completions.create(model=TINY, messages=HELLO, max_tokens=1)

    def runs() -> list[dict[str, Any]]:
        new = [event for event in all_events(graph) if event["seq"] > last]
        return [e for e in new if e["kind"] == "capability_run" and e["model"] == TINY]

    assert here.choices and len(until(runs, 60, "the later request is written down")) == 1


@pytest.mark.spec("J5", "L2")
@pytest.mark.parametrize("text", ["it is ACME-1234", "z" * 200 + "y"])
def test_secret_of_the_operators_and_text_that_takes_too_long_to_search_stay(
    graph: Graph, hostile: None, bea: OpenAI, text: str
) -> None:
    before = egress(graph)
    with pytest.raises(APIStatusError) as refused:
        bea.chat.completions.create(
            model="breaks-chat", messages=[{"role": "user", "content": text}], max_tokens=4
        )
    assert (refused.value.status_code, refused.value.code) == (403, "secret_stays")
    assert text not in str(refused.value) and egress(graph) == before
    ladder = {"ladder": ["breaks-chat", TINY], "pin_primary": True}
    with tasks(graph, far=ladder):
        stayed = bea.chat.completions.with_raw_response.create(
            model="task:far", messages=[{"role": "user", "content": text}], max_tokens=1
        )
    assert stayed.headers["x-arbiter-served-by"] == TINY and egress(graph) == before


@pytest.mark.spec("L2")
def test_no_key_of_a_remote_or_hub_and_no_text_that_is_refused_for_one_is_in_a_log(
    graph: Graph, hostile: None, bea: OpenAI
) -> None:
    for name in KEYED:
        refused = refusal(bea, f"{name}-chat", extra_headers={"x-request-id": f"by-{name}"})
        assert (refused.code, remotes(graph)[name]["cause"]) == ("remote_failed", "key")
    secret = "it is ACME-4321"
    asked: Any = [{"role": "user", "content": secret}]
    with pytest.raises(APIStatusError, match="secret"):
        bea.chat.completions.create(model="breaks-chat", messages=asked, max_tokens=4)
    told = {"x-request-id": "its-secret-stays"}
    with tasks(graph, far={"ladder": ["breaks-chat", TINY], "pin_primary": True}):
        bea.chat.completions.create(
            model="task:far", messages=asked, max_tokens=1, extra_headers=told
        )
    names = {*(f"by-{name}" for name in KEYED), *told.values()}
    until(lambda: logs_naming(graph, *names).keys() == names, 60, "the requests are in a log")
    found_in = logs_naming(graph, *KEYED.values(), HUB_TOKEN[1], secret)
    assert not found_in
    assert not [word for word in (*KEYED.values(), secret) if word in str(all_events(graph))]


@pytest.fixture
def well(graph: Graph) -> Iterator[GoodRemote]:
    """A remote that means well; its key is in the environment."""
    config = copy.deepcopy(graph.config)
    table = config["applications"][0]["deployments"][0]["user_config"]
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(good_remote()) as remote,
    ):
        more = {"key_env": REMOTE_KEY[0], "bounds": {}}
        table["remotes"]["rows"]["well"] = row("well", remote.port) | more
        try:
            deploy(graph, config, "well")
            yield remote
        finally:
            deploy(graph, graph.config, "elsewhere")


@pytest.mark.spec("J5", "L2")
def test_remote_is_sent_listed_fields_fresh_headers_and_the_key_of_the_environment(
    well: GoodRemote, bea: OpenAI
) -> None:
    said = bea.chat.completions.with_raw_response.create(
        model="well-chat",
        messages=HELLO,
        seed=4,
        user="me",
        extra_body={"x_client_id": "terse", "top_k": 3, "metadata": {"a": "b"}},
        extra_headers={"cookie": "a=b", "x-request-id": "mine"},
    )
    assert said.headers["x-arbiter-served-by"] == "well/any"
    assert not {"set-cookie", "x-served-elsewhere"} & said.headers.keys()
    [seen] = well.seen
    limit = {"max_tokens": 3}  # of the profile of `terse`, which is this system's to know
    assert seen.body == {"model": "any", "messages": HELLO, "seed": 4} | limit
    assert dict(seen.headers) == well.headers_of(seen.body, REMOTE_KEY[1])
