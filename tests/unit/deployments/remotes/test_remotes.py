"""Remotes against a good server: what leaves, what comes back, and who may."""

import asyncio
import json
from base64 import b64encode
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from arbiter.errors import ArbiterUnavailable, EgressUnsettled, RequestError, UnknownModel
from arbiter.protocol.messages import DaySpent, Egress
from deployments import messages
from deployments.front.access.keys import Caller, Scope
from deployments.front.inference.request import BadRequest, ParsedRequest, parse
from deployments.remotes import remotes as remotes_module
from deployments.remotes import spending
from deployments.remotes.offers import SERVED_BY, RemoteFailed, RemoteRefused
from deployments.remotes.remotes import Remotes
from tests.support.pictures import png
from tests.support.remote_server import SPENT, USAGE, WORDS, CountingBook, GoodRemote
from tests.unit.deployments.remotes.conftest import CHAT, CLOUD, HELLO, KEY, asked, section


async def answer(
    remotes: Remotes, request: ParsedRequest, caller: Caller = CLOUD
) -> list[messages.Part]:
    call = remotes.call(request, "far-chat", caller)
    try:
        async with aclosing(remotes.run(call)) as parts:
            return [part async for part in parts]
    finally:
        await remotes.background.done()


def data(parts: list[messages.Part]) -> list[Any]:
    """The events of a stream, as far as they are JSON."""
    raw = b"".join(part for part in parts if isinstance(part, bytes))
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in raw.split(b"\n") if line)
    return [json.loads(line) for line in lines if line != b"[DONE]"]


@pytest.mark.spec("J5")
async def test_an_answer_comes_back_with_the_name_of_who_made_it(
    remotes: Remotes, book: CountingBook
) -> None:
    (whole,) = await answer(remotes, await asked())
    assert isinstance(whole, messages.FullResponse)
    assert whole.head.headers == {"content-type": "application/json", SERVED_BY: "cloud/their-chat"}
    assert json.loads(whole.body)["choices"][0]["message"]["content"] == "".join(WORDS)
    (end,) = book.ends
    assert (end.outcome, end.prompt_tokens_count, end.answer_tokens_count) == ("answered", 7, 4)
    assert end.money_micros == 7 * 2 + 4 * 10


@pytest.mark.spec("J5")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_reader_that_takes_nothing_beyond_the_answer_has_the_whole_answer(
    remotes: Remotes, book: CountingBook, is_stream: bool
) -> None:
    """As the front reads a whole answer, and OpenAI's client a stream: to its last part."""
    request = await asked(stream=is_stream)
    parts = remotes.run(remotes.call(request, "far-chat", CLOUD))
    while (part := await anext(parts)) != b"data: [DONE]\n\n" and is_stream:
        pass
    await parts.aclose()
    await remotes.background.done()
    assert book.ends[0].outcome == "answered", part
    took_s = remotes.offer(request, "far-chat", CLOUD).seconds
    assert 0 < took_s < 2.0, "as it took, not as the table would have it of a full answer"


@pytest.mark.spec("J5")
async def test_only_known_fields_and_fresh_headers_leave(
    remotes: Remotes, remote: GoodRemote
) -> None:
    ours = {"authorization": "Bearer arb-ours", "cookie": "a=b", "x-request-id": "mine"}
    message = HELLO[0] | {"stable": True, "odd": 1}
    more = {"user": "me", "metadata": {"a": 1}, "top_k": 3, "x_client_id": "terse", "seed": 4}
    await answer(remotes, await asked(ours, messages=[message], **more))
    (seen,) = remote.seen
    assert seen.body == {
        "model": "their-chat", "messages": HELLO, "seed": 4, "max_tokens": 100,
    }  # fmt: skip
    assert dict(seen.headers) == remote.headers_of(seen.body, KEY)


@pytest.mark.spec("J5")
async def test_a_stream_has_nothing_but_its_data(remotes: Remotes, book: CountingBook) -> None:
    parts = await answer(remotes, await asked(stream=True))
    assert isinstance(parts[0], messages.ResponseHead) and parts[0].is_event_stream
    assert parts[0].headers[SERVED_BY] == "cloud/their-chat"
    assert [e["choices"][0]["delta"]["content"] for e in data(parts)] == list(WORDS)
    assert parts[-1] == b"data: [DONE]\n\n"
    assert book.ends[0].answer_tokens_count == 4  # of the usage, which only we asked for


async def test_a_client_that_asks_for_the_usage_gets_it(remotes: Remotes) -> None:
    wants = {"stream_options": {"include_usage": True}}
    parts = await answer(remotes, await asked(stream=True, **wants))
    assert data(parts)[-1] == {"choices": [], "usage": USAGE}


@pytest.mark.spec("J5")
async def test_a_client_that_leaves_ends_the_remotes_work(
    remotes: Remotes, remote: GoodRemote, book: CountingBook
) -> None:
    remote.waits_after = 2
    remote.goes_on.clear()
    parts = remotes.run(remotes.call(await asked(stream=True), "far-chat", CLOUD))
    assert isinstance(await anext(parts), messages.ResponseHead)
    await parts.aclose()
    async with asyncio.timeout(60):
        await remote.left.wait()
        await remotes.background.done()
    assert book.ends[0].outcome == "left"
    assert book.ends[0].prompt_tokens_count > 0, "what was sent is paid for"


@pytest.mark.spec("J5")
async def test_a_key_without_the_scope_reaches_no_remote(
    remotes: Remotes, remote: GoodRemote
) -> None:
    local = Caller("default", frozenset(Scope) - {Scope.CLOUD})
    offer = remotes.offer(await asked(), "far-chat", local)
    assert not offer.is_allowed and "the key needs the scope `cloud`" in offer.reason
    with pytest.raises(RemoteRefused, match="scope"):
        remotes.call(await asked(), "far-chat", local)
    assert remotes.names(local) == [] and remotes.names(CLOUD) == ["far-chat"]
    assert remote.seen == []


@pytest.mark.spec("J5")
@pytest.mark.parametrize("how", [{"headers": {"x-local-only": "true"}}, {"x_local_only": True}])
async def test_local_only_wins_over_the_scope(remotes: Remotes, how: Any) -> None:
    offer = remotes.offer(await asked(**how), "far-chat", CLOUD)
    assert offer.refusal is not None and offer.refusal.code == "local_only"


@pytest.mark.spec("J5")
async def test_a_clients_false_does_not_take_back_its_header_nor_its_profile(
    remotes: Remotes,
) -> None:
    from deployments.config.front_section import Profile

    profiles = {"careful": Profile(local_only=True)}
    body = {"model": "far-chat", "messages": HELLO, "x_local_only": False}
    said = body | {"x_client_id": "careful"}
    request = await parse(CHAT, json.dumps(said).encode(), {}, profiles)
    assert remotes.offer(request, "far-chat", CLOUD).refusal is not None
    request = await parse(CHAT, json.dumps(body).encode(), {"x-local-only": "true"}, {})
    assert remotes.offer(request, "far-chat", CLOUD).refusal is not None


@pytest.mark.spec("J5")
@pytest.mark.parametrize("header", ["0", "no", "off", "f", "False", "false"])
async def test_no_header_takes_back_what_the_body_says(remotes: Remotes, header: str) -> None:
    stays = await asked({"x-local-only": header}, x_local_only=True)
    offer = remotes.offer(stays, "far-chat", CLOUD)
    assert offer.refusal is not None and offer.refusal.code == "local_only"
    assert remotes.offer(await asked({"x-local-only": header}), "far-chat", CLOUD).is_allowed


@pytest.mark.spec("J5")
@pytest.mark.parametrize("body", [{}, {"x_local_only": True}, {"x_local_only": False}])
async def test_header_of_local_only_that_is_no_boolean_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        await asked({"x-local-only": "nope"}, **body)
    assert (refused.value.status_code, refused.value.param) == (400, "x_local_only")


@pytest.mark.spec("J5")
async def test_one_switch_keeps_everything_here(remotes: Remotes, remote: GoodRemote) -> None:
    call = remotes.call(await asked(), "far-chat", CLOUD)
    off = section(remote.url).model_copy(update={"nothing_leaves": True})
    remotes.configure(off)
    assert remotes.names(CLOUD) == []
    assert remotes.offer(await asked(), "far-chat", CLOUD).refusal.code == "nothing_leaves"  # type: ignore[union-attr]
    with pytest.raises(RemoteRefused, match="nothing leaves"):
        await anext(remotes.run(call))  # also a call that was allowed before
    assert remote.seen == []


@pytest.mark.spec("J5")
async def test_a_request_with_a_secret_stays(remotes: Remotes, remote: GoodRemote) -> None:
    secret = "sk-" + "a1B2" * 8
    with_it = [{"role": "user", "content": f"my key is {secret}"}]
    offer = remotes.offer(await asked(messages=with_it), "far-chat", CLOUD)
    assert offer.refusal is not None and offer.refusal.code == "secret_stays"
    assert secret not in offer.reason


@pytest.mark.spec("J5", "L2")
@pytest.mark.parametrize("text", ["it is ACME-1234", "z" * 200 + "y"])
async def test_secret_of_the_operators_and_text_that_cannot_be_searched_in_time_stay(
    remotes: Remotes, remote: GoodRemote, book: CountingBook, text: str
) -> None:
    own = [r"ACME-\d{4}", r"(z|zz)+$"]  # the second takes for ever over many z
    remotes.configure(section(remote.url).model_copy(update={"secrets": own}))
    with_it = await asked(messages=[{"role": "user", "content": text}])
    with pytest.raises(RemoteRefused) as refused:
        remotes.call(with_it, "far-chat", CLOUD)
    assert (refused.value.status_code, refused.value.code) == (403, "secret_stays")
    assert text not in str(refused.value) and (remote.seen, book.left_for) == ([], [])


@pytest.mark.spec("J5")
async def test_what_a_remote_is_not_to_see_stays(remotes: Remotes) -> None:
    url = f"data:image/png;base64,{b64encode(png(Image.new('RGB', (8, 8)))).decode()}"
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    offer = remotes.offer(await asked(messages=seen), "far-chat", CLOUD)
    assert offer.refusal is not None and offer.refusal.code == "modality_stays"


@pytest.mark.spec("J5")
async def test_nothing_leaves_that_is_not_written_down_first(
    remotes: Remotes, remote: GoodRemote, book: CountingBook
) -> None:
    for error in (SPENT, ArbiterUnavailable(5.0)):
        book.error = error
        with pytest.raises(type(error)):
            await answer(remotes, await asked())
    assert remote.seen == [] and [end.outcome for end in book.ends] == ["unsent"]


@pytest.mark.spec("J5")
async def test_an_end_is_told_until_it_is_written_down(
    remotes: Remotes, book: CountingBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "AGAIN_S", 0.001)
    book.unsettled = [ArbiterUnavailable(5.0), EgressUnsettled("cloud", "the disk is full")]
    await answer(remotes, await asked())
    (end,) = book.ends
    assert (end.outcome, end.prompt_tokens_count, end.answer_tokens_count) == ("answered", 7, 4)


@pytest.mark.spec("J5")
async def test_an_end_is_told_again_once_another_message_got_through(
    remotes: Remotes, book: CountingBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "AGAIN_S", 60.0)
    monkeypatch.setattr(remotes_module, "CLOSE_S", 0.01)
    book.unsettled = [ArbiterUnavailable(5.0)]
    async with aclosing(remotes.run(remotes.call(await asked(), "far-chat", CLOUD))) as parts:
        assert [part async for part in parts]
    await remotes.close()  # which does not wait for a minute
    assert book.ends == []
    await asyncio.wait_for(answer(remotes, await asked()), 60)
    assert len(book.ends) == 2 and len({end.egress.id for end in book.ends}) == 2


@pytest.mark.spec("J5")
async def test_a_client_that_leaves_before_anything_left_has_nothing_reserved(
    remotes: Remotes, remote: GoodRemote, book: CountingBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    async def reserve(egress: Egress) -> DaySpent:
        book.left_for.append(egress)
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(book, "reserve", reserve)
    running = asyncio.ensure_future(answer(remotes, await asked()))
    await asyncio.wait_for(is_asked.wait(), 60)
    running.cancel()
    await asyncio.wait({running})
    await asyncio.wait_for(remotes.background.done(), 60)
    (end,) = book.ends
    assert end.egress == book.left_for[0]
    assert (end.outcome, end.prompt_tokens_count, end.money_micros) == ("unsent", 0, 0)
    assert remote.seen == [] and remotes.rows()[0]["in_flight"] == 0


@pytest.mark.spec("J5")
@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_table_that_changes_while_a_request_is_written_down_keeps_it_here(
    remotes: Remotes,
    remote: GoodRemote,
    book: CountingBook,
    monkeypatch: pytest.MonkeyPatch,
    is_removed: bool,
) -> None:
    changed: dict[str, Any] = {"rows": {}} if is_removed else {"nothing_leaves": True}
    written_down = book.reserve

    async def reserve(egress: Egress) -> DaySpent:
        remotes.configure(section(remote.url).model_copy(update=changed))
        return await written_down(egress)

    monkeypatch.setattr(book, "reserve", reserve)
    with pytest.raises(UnknownModel if is_removed else RemoteRefused):
        await answer(remotes, await asked())
    (end,) = book.ends
    assert (end.egress, end.outcome) == (book.left_for[0], "unsent")
    assert remote.seen == []


@pytest.mark.spec("J5")
async def test_a_budget_is_per_tenant_and_an_offer_knows_it(
    remotes: Remotes, remote: GoodRemote
) -> None:
    row = section(remote.url, budget={"money": 0.00106}, tenants={"rich": {"money": 1}})
    remotes.configure(row)
    offer = remotes.offer(await asked(), "far-chat", CLOUD)
    assert offer.is_allowed and 0.001 < offer.money < 0.00106 and offer.seconds == 3.0
    await answer(remotes, await asked())
    said = remotes.offer(await asked(), "far-chat", CLOUD).reason
    assert "default has spent" in said and "money at cloud" in said
    rich = Caller("rich", CLOUD.scopes)
    assert remotes.offer(await asked(), "far-chat", rich).is_allowed


@pytest.mark.spec("J5")
async def test_what_a_remote_says_of_an_error_is_not_passed_on(
    remotes: Remotes, remote: GoodRemote, book: CountingBook
) -> None:
    remote.status = 400
    with pytest.raises(RemoteRefused) as refused:
        await answer(remotes, await asked())
    assert KEY not in str(refused.value) and "hello" not in str(refused.value)
    assert (book.ends[0].outcome, book.ends[0].money_micros) == ("refused", 0) and remotes.offer(
        await asked(), "far-chat", CLOUD
    ).is_allowed
    remote.status = 401
    with pytest.raises(RemoteFailed) as failed:
        await answer(remotes, await asked())
    assert KEY not in str(failed.value) and "(401)" in str(failed.value)
    (row,) = remotes.rows()
    assert (row["remote"], row["cause"], row["in_flight"]) == ("cloud", "key", 0)
    cooling = remotes.offer(await asked(), "far-chat", CLOUD).refusal
    assert cooling is not None and (cooling.code, cooling.retry_after_s) == (
        "remote_cooling_down",
        pytest.approx(300, abs=5),
    )


@pytest.mark.spec("J5", "L3")
async def test_requests_that_a_remote_forbids_take_it_from_no_other_caller(
    remotes: Remotes, remote: GoodRemote, book: CountingBook
) -> None:
    for _ in range(2):
        remote.status = 403
        for _ in range(2):
            with pytest.raises(RemoteFailed, match="403"):
                await answer(remotes, await asked())
        remote.status = 200
        await answer(remotes, await asked())
    assert [end.outcome for end in book.ends] == ["forbidden", "forbidden", "answered"] * 2


async def test_other_paths_and_names_are_refused(remotes: Remotes) -> None:
    request = await asked(path="/v1/completions", prompt="a")
    with pytest.raises(messages.NotServedHere):
        remotes.call(request, "far-chat", CLOUD)
    with pytest.raises(UnknownModel):
        remotes.offer(await asked(), "near-chat", CLOUD)
    assert issubclass(RemoteRefused, RequestError)


@pytest.mark.spec("J5")
async def test_a_clients_short_deadline_says_nothing_of_the_remote(
    remotes: Remotes, remote: GoodRemote
) -> None:
    remote.waits_after = 0
    remote.goes_on.clear()
    for _ in range(4):
        with pytest.raises(RemoteRefused) as late:
            await answer(remotes, await asked(stream=True, x_deadline_s=0.05))
        assert (late.value.status_code, late.value.code) == (504, "deadline_unmet")
    assert remotes.offer(await asked(), "far-chat", CLOUD).is_allowed


@pytest.mark.spec("J5")
async def test_a_request_whose_deadline_is_over_does_not_leave(
    remotes: Remotes, remote: GoodRemote
) -> None:
    call = replace(remotes.call(await asked(), "far-chat", CLOUD), deadline_s=-0.1)
    with pytest.raises(RemoteRefused, match="over before it left"):
        await anext(remotes.run(call))
    assert remote.seen == []
