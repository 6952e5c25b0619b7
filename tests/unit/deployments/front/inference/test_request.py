"""What a client writes, and what its engine is sent: extension fields out, defaults in."""

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from arbiter.core.types import Priority
from arbiter.errors import UnknownModel
from deployments import messages
from deployments.config.fields import KvTerm
from deployments.config.schema import Table, parse_table
from deployments.engines.vllm.batching.batch_gate import MAX_WAITING
from deployments.front.inference import request
from deployments.front.inference.model_names import ModelNames
from deployments.front.inference.request import (
    BadRequest,
    ParsedRequest,
    inference_call,
    json_object,
    parse,
)
from deployments.front.inference.schemas import MAX_PROMPTS, MAX_SEQUENCES, PRIVATE
from deployments.routing.pieces import HASH_BYTES
from tests.support.examples import examples

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "x"}]
PLAIN = {"model": "tiny", "messages": HELLO}


def table(model: dict[str, Any] | None = None, **front: Any) -> Table:
    models = {"tiny": {"source": "x", **(model or {})}, "other": {"source": "y"}}
    chat = {"role": "text", "engine": "vllm", "models": models}
    return parse_table({"front": front, "capabilities": {"chat": chat}})


async def read(
    raw: bytes, headers: dict[str, str] | None = None, of: Table | None = None, path: str = CHAT
) -> ParsedRequest:
    said = Headers(
        {k: v.encode("latin-1", "ignore").decode("latin-1") for k, v in (headers or {}).items()}
    )
    return await parse(path, raw, said, (of or table()).front.profiles)


async def asked(
    body: dict[str, Any], headers: dict[str, str] | None = None, of: Table | None = None
) -> ParsedRequest:
    return await read(json.dumps(body).encode(), headers, of)


async def call(
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    of: Table | None = None,
    tenant: str = "default",
) -> tuple[messages.InferenceCall, dict[str, Any]]:
    of = of or table()
    it = await asked(body, headers, of)
    target = await ModelNames(of).find(it.model, tenant)
    made = inference_call(it, target, of.capabilities["chat"].models[target.model], tenant)
    return made, json.loads(made.body)


async def refused(body: dict[str, Any], headers: dict[str, str] | None = None) -> str | None:
    with pytest.raises(BadRequest) as caught:
        await asked(body, headers)
    assert caught.value.status_code == 400
    assert caught.value.param is not None and caught.value.param in str(caught.value)
    return caught.value.param


@pytest.mark.spec("L3")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
async def test_number_that_is_not_finite_is_refused_by_the_name_of_its_field(number: str) -> None:
    raw = json.dumps(PLAIN | {"metadata": {"a": "?"}}).replace('"?"', number)
    with pytest.raises(BadRequest, match="`metadata`: not a finite number") as caught:
        await read(raw.encode())
    assert caught.value.param == "metadata"


@pytest.mark.spec("L3")
@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00", r"\ude00\ud83d", r"\\\ud83d"])
async def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_its_field(half: str) -> None:
    for field in ({"metadata": {"a": ["?"]}}, {"metadata": {"?": 1}}):
        raw = json.dumps(PLAIN | field).replace("?", half)
        with pytest.raises(BadRequest, match=r"`metadata`.*surrogate") as caught:
            await read(raw.encode())
        assert caught.value.param == "metadata"
    with pytest.raises(BadRequest, match="not JSON"):
        await read(b'{"model": "tiny", "user": "\xed\xa0\xbd"}')  # as bytes, which UTF-8 has not


@pytest.mark.spec("L3")
def test_field_that_can_be_read_and_is_nested_too_deeply_to_be_written_is_refused() -> None:
    refused = set()
    for depth in range(sys.getrecursionlimit()):
        raw = '{"metadata": ' + "[" * depth + r'"\ud83d\ude00"' + "]" * depth + "}"
        try:
            json_object(raw.encode())
        except BadRequest as error:
            refused.add(error.param)
    assert refused == {"metadata", None}


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud83d", "\U0001f600"])
async def test_whole_pairs_and_what_only_looks_like_half_of_one_are_text(text: str) -> None:
    raw = json.dumps(PLAIN | {"user": "?"}, ensure_ascii=False).replace("?", text)
    assert (await read(raw.encode())).fields == json.loads(raw)


@pytest.mark.spec("J2")
async def test_extension_fields_are_read_and_do_not_reach_the_engine() -> None:
    said = {
        "x_priority": "low", "x_deadline_s": 2.5, "x_stay_warm": 30, "x_conversation_id": "c-1",
        "x_client_id": "me", "x_else": 1,
    }  # fmt: skip
    made, body = await call(PLAIN | said)
    assert (made.priority, made.deadline_s, made.stay_warm_s) == (Priority.LOW, 2.5, 30.0)
    assert made.key == "conv:c-1"
    assert body == PLAIN


@pytest.mark.spec("G2", "J2")
@pytest.mark.spec("J2")
@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/images/generations", "x_step", "x_steps"),
        ("/v1/images/generations", "x_negativ_prompt", "x_negative_prompt"),
        ("/v1/chat/completions", "x_deadline", "x_deadline_s"),
    ],
)
async def test_extension_that_is_nearly_one_of_ours_is_refused_with_the_one_meant(
    path: str, name: str, meant: str
) -> None:
    asks = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    raw = json.dumps({"model": "m", name: 1} | asks).encode()
    with pytest.raises(BadRequest, match=f"`{name}`.*`{meant}`") as caught:
        await read(raw, path=path)
    assert caught.value.param == name


@pytest.mark.spec("J2", "L3")
async def test_names_of_many_unknown_extensions_are_not_all_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def compare(name: str, ours: list[str], **_: object) -> list[str]:
        compared.append(name)
        return get_close_matches(name, ours)

    monkeypatch.setattr(request, "get_close_matches", compare)
    unknown = {f"x_other_{number}": 1 for number in range(1_000)}
    await read(json.dumps(PLAIN | {"x_" + "y" * 1_000: 1} | unknown).encode())
    assert compared == [f"x_other_{number}" for number in range(request.MISSPELT_MOST)]


async def test_conversation_that_a_header_names_is_the_key_of_its_call() -> None:
    made, _ = await call(PLAIN | {"prompt_cache_key": "k"}, {"x-conversation-id": "c-2"})
    assert made.key == "conv:c-2"
    made, body = await call(PLAIN | {"prompt_cache_key": "k"})
    assert (made.key, body["prompt_cache_key"]) == ("v5:k", "k")


@pytest.mark.spec("G3")
async def test_call_carries_the_pieces_of_the_prompt_that_its_engine_gets() -> None:
    long = PLAIN | {"messages": [{"role": "user", "content": "x" * 2_000}]}
    plain, _ = await call(long)
    assert len(plain.pieces) == 3 * HASH_BYTES
    of = table(model={"defaults": {"tools": [{"type": "function", "function": {}}]}})
    other, _ = await call(long, of=of)
    assert other.pieces[:HASH_BYTES] != plain.pieces[:HASH_BYTES]
    of_acme, _ = await call(long, tenant="acme")
    assert of_acme.pieces[:HASH_BYTES] != plain.pieces[:HASH_BYTES]
    assert (await call(PLAIN))[0].pieces == b""


@pytest.mark.spec("G4")
async def test_term_goes_to_the_engine_where_it_is_not_the_usual_one() -> None:
    of = table()
    it, target = await asked(PLAIN), await ModelNames(of).find("tiny", "default")

    def told(term: KvTerm | None) -> Any:
        made = inference_call(
            it, target, of.capabilities["chat"].models["tiny"], "default", term=term
        )
        return json.loads(made.body).get("kv_transfer_params")

    assert (told("short"), told("extended")) == ({"term": "short"}, {"term": "extended"})
    assert told("long") is None is told(None)


@pytest.mark.spec("J1", "J2")
async def test_extension_fields_of_pictures_reach_the_engine_and_no_others_do() -> None:
    drawing = {"model": "tiny", "prompt": "x", "x_seed": 3, "x_steps": 4, "x_guidance": 1.5}
    drawing |= {"x_negative_prompt": "y", "x_strength": 0.5}
    said = json.dumps(drawing | {"x_priority": "low", "x_else": 1}).encode()
    it = await read(said, path="/v1/images/generations")
    target, of = await ModelNames(table()).find("tiny", "default"), table()
    made = inference_call(it, target, of.capabilities["chat"].models["tiny"], "default")
    assert json.loads(made.body) == drawing
    assert (made.priority, made.wants_progress) == (Priority.LOW, False)


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("fields", "field"),
    [({"response_format": "url"}, "response_format"), ({"n": 11}, "n"), ({"x_seed": -1}, "x_seed")],
)
async def test_fields_of_pictures_are_checked_before_a_model_is_loaded(
    fields: dict[str, Any], field: str
) -> None:
    said = json.dumps({"model": "tiny", "prompt": "x", **fields}).encode()
    with pytest.raises(BadRequest) as caught:
        await read(said, path="/v1/images/generations")
    assert caught.value.param == field


@pytest.mark.spec("J2")
async def test_an_extension_may_be_a_header_and_the_body_wins() -> None:
    headers = {"x-priority": "batch", "x-deadline-s": "9", "x-stay-warm": "true"}
    made, _ = await call(PLAIN | {"x_deadline_s": 1}, headers)
    assert (made.priority, made.deadline_s, made.stay_warm_s) == (Priority.BATCH, 1.0, 600.0)
    made, _ = await call(PLAIN, {"x-stay-warm": "1"})
    assert made.stay_warm_s == 1.0
    assert await refused(PLAIN, {"x-priority": "extreme"}) == "x_priority"


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x_kv_term", "for ever"), ("prompt_cache_retention", "48h"), ("x_prefix_id", "a b"),
        ("prompt_cache_key", "k" * 513), ("prompt_cache_key", 7),
        ("x_priority", 1), ("x_deadline_s", -1), ("x_deadline_s", float("nan")),
        ("x_deadline_s", 1e9), ("x_stay_warm", "for ever"), ("x_stay_warm", 1e6),
        ("x_client_id", "a b"), ("x_client_id", ""), ("x_conversation_id", "x" * 129),
        ("x_conversation_id", {}), ("model", "m" * 301), ("model", ""), ("model", None),
        ("messages", []), ("messages", "hello"), ("messages", [1]), ("n", 0), ("n", 129),
        ("stream", "perhaps"), ("tools", [{}] * 129), ("stop", ["x"] * 17), ("top_logprobs", 21),
        ("temperature", "hot"), ("stream_options", 1), ("seed", 1.5),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named_before_anything_is_loaded(field: str, value: Any) -> None:
    assert await refused(PLAIN | {field: value}) == field


@pytest.mark.spec("J1")
@pytest.mark.parametrize("stop", ["<|end_of_my_long_answer|>" * 40, ["<|end|>" * 40] * 16, ""])
async def test_how_long_a_stop_text_is_counts_for_nothing(stop: Any) -> None:
    assert (await call(PLAIN | {"stop": stop}))[1]["stop"] == stop


@pytest.mark.spec("J8", "L3")
@pytest.mark.parametrize("prompts", [["a"] * MAX_PROMPTS, [7] * 1_000, [[7] * 9] * MAX_PROMPTS])
async def test_prompts_of_one_completion_leave_places_for_other_requests(prompts: Any) -> None:
    said = {"model": "tiny", "prompt": prompts}
    it = await read(json.dumps(said).encode(), path="/v1/completions")
    assert it.fields == said and 8 * MAX_PROMPTS <= MAX_WAITING
    if isinstance(prompts[0], int):
        return
    said["prompt"] = [*prompts, prompts[0]]
    with pytest.raises(BadRequest, match=f"{MAX_PROMPTS + 1} inputs; at most {MAX_PROMPTS}") as no:
        await read(json.dumps(said).encode(), path="/v1/completions")
    assert (no.value.status_code, no.value.param) == (400, "prompt")


@pytest.mark.spec("J8", "L3")
@pytest.mark.parametrize("name", ["n", "best_of"])
@pytest.mark.parametrize("prompt", ["a", [7]])
async def test_prompts_times_choices_of_one_completion_are_bounded(name: str, prompt: Any) -> None:
    async def asked_for(prompts: Any, each: int) -> None:
        said = {"model": "tiny", "prompt": prompts, name: each}
        await read(json.dumps(said).encode(), path="/v1/completions")

    await asked_for(prompt, MAX_SEQUENCES)
    await asked_for([prompt] * 8, MAX_SEQUENCES // 8)
    for prompts, each in ((8, MAX_SEQUENCES // 8 + 1), (MAX_PROMPTS, 2)):
        said = f"`{name}` {each} are {prompts * each} sequences; at most {MAX_SEQUENCES}"
        with pytest.raises(BadRequest, match=said) as no:
            await asked_for([prompt] * prompts, each)
        assert (no.value.status_code, no.value.param) == (400, "prompt")


@pytest.mark.spec("L3")
@pytest.mark.parametrize("field", sorted(PRIVATE))
async def test_fields_that_act_on_the_engine_are_refused(field: str) -> None:
    assert await refused(PLAIN | {field: "x"}) == field


async def test_body_that_needs_no_change_is_forwarded_unchanged() -> None:
    raw = b'{"model":  "tiny", "messages": [{"role": "user", "content": "x"}]}'
    it = await read(raw)
    made = inference_call(
        it,
        await ModelNames(table()).find("tiny", ""),
        table().capabilities["chat"].models["tiny"],
        "default",
    )
    assert made.body == raw


@pytest.mark.spec("J6")
async def test_a_profile_gives_names_and_defaults_to_clients_that_ask_for_it() -> None:
    profile = {
        "aliases": {"gpt-4o": "tiny"}, "defaults": {"temperature": 0.1, "max_tokens": 5},
        "priority": "low", "deadline_s": 7, "stay_warm_s": 3,
    }  # fmt: skip
    of = table({"defaults": {"max_tokens": 50, "top_p": 0.9}}, profiles={"editor": profile})
    mine = {"model": "gpt-4o", "messages": HELLO, "x_client_id": "editor", "temperature": 1}
    made, body = await call(mine, of=of)
    assert (made.model, made.priority, made.deadline_s) == ("tiny", Priority.LOW, 7.0)
    assert body == PLAIN | {"temperature": 1, "max_tokens": 5, "top_p": 0.9}
    made, _ = await call(mine | {"x_priority": "batch", "x_deadline_s": 1}, of=of)
    assert (made.priority, made.deadline_s) == (Priority.BATCH, 1.0)
    with pytest.raises(UnknownModel):
        await call({"model": "gpt-4o", "messages": HELLO}, of=of)


@pytest.mark.spec("J6")
async def test_thinking_is_the_manifests_unless_the_request_says_so() -> None:
    of = table({"thinking": False})
    _, body = await call(PLAIN, of=of)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    _, body = await call(PLAIN | {"chat_template_kwargs": {"enable_thinking": True}}, of=of)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.spec("L1")
async def test_prompts_of_a_tenant_are_cached_apart_and_no_header_names_the_tenant() -> None:
    made, body = await call(PLAIN, {messages.TENANT_HEADER: "victim"}, tenant="acme")
    assert body["cache_salt"] == "acme"
    assert made.headers[messages.TENANT_HEADER] == "acme"


@pytest.mark.spec("F6", "L1")
async def test_no_header_of_a_client_sets_its_priority_or_deadline_in_the_engine() -> None:
    lies = {messages.PRIORITY_HEADER: "1", messages.DEADLINE_HEADER: "9999"}
    made, _ = await call(PLAIN, lies)
    assert not lies.keys() & made.headers.keys()
    assert (made.priority, made.deadline_s) == (Priority.NORMAL, None)


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    "kind", [None, "application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]
)
async def test_json_reaches_the_engine_as_json_whatever_its_client_declared(
    kind: str | None,
) -> None:
    made, _ = await call(PLAIN, {"content-type": kind} if kind else None)
    assert made.headers["content-type"] == "application/json"


# -- forms ----------------------------------------------------------------------------------------

UPLOAD = "/v1/hear"
BOUND = "multipart/form-data; boundary=b"
MULTIPART = {"content-type": BOUND}


def form(*parts: tuple[str, bytes], file: bytes = b"") -> bytes:
    """A multipart body with a boundary of `b`; the file comes first, as curl has it."""
    head = b'--b\r\nContent-Disposition: form-data; name="'
    upload = head + b'file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + file
    fields = [head + name.encode() + b'"\r\n\r\n' + value for name, value in parts]
    return b"\r\n".join([upload, *fields, b"--b--\r\n"])


async def test_form_goes_on_as_it_came_with_its_fields_read() -> None:
    raw = form(
        ("model", b"tiny"), ("x_priority", b"low"), ("x_stay_warm", b"2"), file=b"\x00\xff--"
    )
    it = await read(raw, MULTIPART, path=UPLOAD)
    target = await ModelNames(table()).find(it.model, "acme")
    made = inference_call(it, target, table().capabilities["chat"].models["tiny"], "acme")
    assert made.body == raw
    assert made.headers["content-type"] == MULTIPART["content-type"]
    assert made.headers[messages.SERVED_HEADER] == "tiny"
    assert (made.model, made.priority, made.stay_warm_s) == ("tiny", Priority.LOW, 2.0)


@pytest.mark.spec("J1", "J3")
async def test_a_form_that_asks_for_a_stream_wants_progress_too() -> None:
    raw = form(("model", b"tiny"), ("prompt", b"x"), ("stream", b"true"))
    it = await read(raw, MULTIPART, path="/v1/images/edits")
    assert it.is_stream and it.raw == raw


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("raw", "kind", "param"),
    [
        (form(("x_priority", b"low")), BOUND, "model"),
        (form(("model", b"tiny"), ("x_priority", b"now")), BOUND, "x_priority"),
        (form(("model", b"tiny"), ("session_id", b"1")), BOUND, "session_id"),
        (form(("model", b"tiny")), "multipart/form-data", None),
        (form(("model", b"tiny")), "multipart/form-data; boundary=c", None),
        (form(("model", b"tiny")), "multipart/form-data; boundary=b; charset=\x00", None),
        (b"", BOUND, "model"),
        (form(("model", b"x" * (2 << 20))), BOUND, None),
        (form(*[("model", b"x")] * 200), BOUND, None),
        (form(("model", b"tiny")), "application/json", None),
    ],
)  # fmt: skip
async def test_form_that_is_wrong_is_refused_by_name(
    raw: bytes, kind: str, param: str | None
) -> None:
    with pytest.raises(BadRequest) as caught:
        await read(raw, {"content-type": kind}, path=UPLOAD)
    assert (caught.value.status_code, caught.value.param) == (400, param)


HEAR, SPEAK, VAD = "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/vad"


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        (HEAR, form(("model", b"tiny")), "file"),  # empty
        (HEAR, form(("model", b"tiny"), file=b"x").replace(b'"file"', b'"film"'), "file"),
        (HEAR, form(("model", b"tiny"), ("file", b"5")), "file"),  # text by that name
        (HEAR, form(("model", b"tiny"), file=b"x" * ((25 << 20) + 1)), "file"),
        (HEAR, form(("model", b"tiny"), ("temperature", b"2"), file=b"x"), "temperature"),
        (HEAR, form(("model", b"tiny"), ("response_format", b"x"), file=b"x"), "response_format"),
        (HEAR, form(("model", b"tiny"), ("stream", b"x"), file=b"x"), "stream"),
        (HEAR, form(("model", b"tiny"), ("prompt", b"x" * 10_001), file=b"x"), "prompt"),
        (
            HEAR,
            form(("model", b"tiny"), ("timestamp_granularities[]", b"x"), file=b"x"),
            "timestamp_granularities[]",
        ),
        (VAD, form(("model", b"tiny"), ("threshold", b"1"), file=b"x"), "threshold"),
    ],
)
async def test_wrong_form_of_sound_is_refused_by_name(path: str, raw: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await read(raw, MULTIPART, path=path)
    assert (caught.value.status_code, caught.value.param) == (400, param)


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", ""), ("input", "x" * 4_097), ("input", None), ("voice", 5), ("voice", {"id": ""}),
        ("response_format", "exe"), ("speed", 0.2), ("speed", 4.1), ("stream_format", "x"),
    ],
)  # fmt: skip
async def test_wrong_field_of_a_speech_is_named(field: str, value: Any) -> None:
    body = {"model": "tiny", "input": "Hello.", "voice": "joe"} | {field: value}
    with pytest.raises(BadRequest) as caught:
        await read(json.dumps(body).encode(), path=SPEAK)
    assert caught.value.param == field


@pytest.mark.spec("J3")
async def test_requests_for_events_about_sound_want_progress() -> None:
    told = [form(("model", b"tiny"), ("stream", word), file=b"x") for word in (b"true", b"false")]
    heard = [await read(raw, MULTIPART, path=HEAR) for raw in told]
    assert [it.is_stream for it in heard] == [True, False]
    for form_, wants in (("sse", True), ("audio", False)):
        body = {"model": "tiny", "input": "Hello.", "stream_format": form_}
        assert (await read(json.dumps(body).encode(), path=SPEAK)).is_stream is wants


@pytest.mark.spec("L3")
@given(st.binary(max_size=200), st.text(max_size=30))
async def test_any_form_is_understood_or_refused(raw: bytes, boundary: str) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    with pytest.raises(BadRequest):
        await read(raw, kind, path=UPLOAD)


# -- names ----------------------------------------------------------------------------------------


def with_adapters(folder: Path, *names: str) -> Table:
    for name in names:
        place = folder / name
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text('{"r": 8}')
        (place / "adapter_model.safetensors").write_bytes(b"")
    return table({"adapters": {"folder": str(folder)}})


@pytest.mark.spec("F2")
async def test_an_adapter_is_found_by_full_and_by_bare_name(tmp_path: Path) -> None:
    names = ModelNames(with_adapters(tmp_path, "law"))
    for name in ("law", "tiny:law"):
        target = await names.find(name, "acme")
        assert (target.model, target.served, target.capability) == ("tiny", "tiny:law", "chat")
    assert await names.visible("acme") == ("other", "tiny", "tiny:law")


@pytest.mark.spec("F2", "L1")
async def test_an_adapter_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    names = ModelNames(with_adapters(tmp_path, "@acme/secret"))
    assert (await names.find("secret", "acme")).served == "tiny:secret"
    assert "tiny:secret" not in await names.visible("evil")
    for name in ("secret", "tiny:secret", "@acme/secret", "tiny:@acme/secret", "secre"):
        with pytest.raises(UnknownModel) as caught:
            await names.find(name, "evil")
        assert "secret'" not in str(caught.value).replace(repr(name), "")
        assert not any("secret" in known for known in caught.value.known)


@pytest.mark.spec("L3")
async def test_a_near_miss_is_offered_among_thousands(tmp_path: Path) -> None:
    names = ModelNames(with_adapters(tmp_path, *(f"adapter-{n:04}" for n in range(300))))
    with pytest.raises(UnknownModel) as caught:
        await names.find("adapter-01234", "")
    assert "or adapter-0123?" in str(caught.value)
    assert len(str(caught.value)) < 1_000
    with pytest.raises(UnknownModel, match="did you mean tiny"):
        await names.find("tinny", "")


@settings(max_examples=examples(200))
@given(st.text(max_size=60))
async def test_no_name_leaves_its_folder_or_breaks_the_front(name: str) -> None:
    names = ModelNames(table({"adapters": {"folder": "/proc"}}))
    if name not in ("tiny", "other"):
        with pytest.raises(UnknownModel):
            await names.find(name, name)


# -- whatever a client may send -------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "messages", "n", "stop", "stream", "x_priority", "x_stay_warm"])
HEADERS = st.dictionaries(
    st.sampled_from(["x-priority", "x-deadline-s", "x-stay-warm", "x-client-id", "x-request-id",
                     "content-length", "content-type"]),
    st.text(max_size=30),
)  # fmt: skip


@pytest.mark.spec("L3")
@given(st.dictionaries(FIELDS, JSON), HEADERS)
async def test_any_body_and_headers_are_understood_or_refused_by_name(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    try:
        it = await read(json.dumps(PLAIN | body).encode(), headers)
    except BadRequest as error:
        assert error.status_code == 400
        return
    target = await ModelNames(table()).find("tiny", "")
    made = inference_call(it, target, table().capabilities["chat"].models["tiny"], "default")
    assert made.request_id.isprintable()
    assert not [name for name in json.loads(made.body) if name.startswith("x_")]


@pytest.mark.spec("L3")
@given(st.binary(max_size=200))
async def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        await read(raw)
