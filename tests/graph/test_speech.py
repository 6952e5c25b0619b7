"""Speech over the whole graph, by the official client, unchanged: every method of these routes."""

import base64
import io
import json
import urllib.request
from collections.abc import AsyncIterator

import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.graph.conftest import Graph, until
from tests.support import whisper_base
from tests.support.graph_commands import level, unload_all
from tests.support.speech import SENTENCES, form, plain, samples_of, seconds_of, wav, wer

ASR, TTS, VAD = "tiny.en", "joe", "silero-vad"
MULTILINGUAL = "whisper-base"  # of `graph`
FOX = SENTENCES[0]
QUESTION = "What happens when an engine hangs?"
ANSWER = "It is killed by the node agent, and its bytes are reclaimed."


@pytest.fixture(scope="module")
def fox(graph: Graph) -> bytes:
    client = OpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=120, max_retries=0)
    return spoken(client, FOX)


@pytest.fixture
async def later(graph: Graph) -> AsyncIterator[AsyncOpenAI]:
    url = f"{graph.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def spoken(client: OpenAI, text: str, form_: str = "wav") -> bytes:
    answer = client.audio.speech.create(model=TTS, voice="alloy", input=text, response_format=form_)
    return answer.content


def named(raw: bytes, name: str = "speech.wav") -> io.BytesIO:
    file = io.BytesIO(raw)
    file.name = name
    return file


def heard(client: OpenAI, raw: bytes) -> str:
    return client.audio.transcriptions.create(model=ASR, file=named(raw)).text


@pytest.mark.spec("H3", "H4", "M1")
def test_what_is_spoken_is_understood(graph: Graph, client: OpenAI) -> None:
    """From nothing loaded; each sentence is itself again, and none is another."""
    until(lambda: unload_all(graph) and not graph.engines(), 60, "nothing is loaded")
    said = [spoken(client, sentence) for sentence in SENTENCES]
    texts = [heard(client, raw) for raw in said]
    assert wer(list(SENTENCES), texts) <= 0.03
    for sentence, text in zip(SENTENCES, texts, strict=True):
        content = {word for word in plain(sentence).split() if len(word) > 4}
        assert len(content - set(plain(text).split())) <= 1, (sentence, text)


@pytest.mark.spec("J1", "H4")
@pytest.mark.parametrize("form_", ["mp3", "opus", "aac", "flac", "pcm"])
def test_speech_comes_in_each_format(client: OpenAI, fox: bytes, form_: str) -> None:
    raw = spoken(client, FOX, form_)
    seconds = len(raw) / 48_000 if form_ == "pcm" else seconds_of(raw)
    assert seconds == pytest.approx(seconds_of(fox), abs=0.05)


@pytest.mark.spec("J1", "H4")
def test_speech_streams_before_its_length_is_known(client: OpenAI) -> None:
    text = " ".join(SENTENCES[:4])
    create = client.audio.speech.with_streaming_response.create
    with create(model=TTS, voice={"id": "joe"}, input=text, response_format="pcm") as answer:
        assert answer.headers["content-type"] == "audio/pcm"
        assert "content-length" not in answer.headers  # not known when the first clause leaves
        said = b"".join(answer.iter_bytes())
    assert said == spoken(client, text, "pcm")


@pytest.mark.spec("J1", "H4")
async def test_speech_as_events_is_the_same_speech(later: AsyncOpenAI) -> None:
    create = later.audio.speech.with_streaming_response.create
    text = " ".join(SENTENCES[:4])
    asked = {"model": TTS, "voice": "joe", "input": text, "response_format": "pcm"}
    async with create(**asked, stream_format="sse") as answer:
        lines = [line async for line in answer.iter_lines() if line.startswith("data: ")]
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert done["type"] == "speech.audio.done"
    assert len(deltas) >= 4  # one for each sentence at least
    pcm = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert pcm == (await later.audio.speech.create(**asked)).content


@pytest.mark.spec("J1", "H4")
def test_voices_are_listed_and_nothing_is_loaded_for_it(graph: Graph, client: OpenAI) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    said = graph.get("/v1/audio/voices")
    assert {(row["id"], row["model"]) for row in said["data"]} == {("joe", "joe"), ("alloy", "joe")}
    assert graph.tickets("tts") == {}
    with pytest.raises(APIStatusError, match="does not take POST") as caught:
        client.audio.voices.create(name="ann", type="prompt", prompt="A calm voice.")
    assert caught.value.status_code == 405


@pytest.mark.spec("J1", "H3")
def test_transcripts_come_in_each_format(client: OpenAI, fox: bytes) -> None:
    create = client.audio.transcriptions.create
    for form_ in ("text", "srt", "vtt"):
        text = create(model=ASR, file=named(fox), response_format=form_)
        assert isinstance(text, str) and "fox" in text
    both = ["word", "segment"]
    said = create(
        model=ASR,
        file=named(fox),
        response_format="verbose_json",
        timestamp_granularities=both,
        language="en",
        prompt="A fox and a dog.",
        temperature=0,
    )
    assert plain(said.text) == plain(FOX)
    assert said.duration == pytest.approx(seconds_of(fox), abs=0.01)
    assert [plain(word.word) for word in said.words] == plain(FOX).split()
    assert said.segments[0].start < 0.5


@pytest.mark.spec("J1", "H3")
def test_transcript_streams_as_the_clients_events(client: OpenAI) -> None:
    text = " ".join(SENTENCES[2:6])
    stream = client.audio.transcriptions.create(
        model=ASR, file=named(spoken(client, text, "mp3"), "speech.mp3"), stream=True
    )
    *deltas, done = list(stream)
    assert {event.type for event in deltas} == {"transcript.text.delta"} and len(deltas) > 1
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas).strip() == done.text
    assert wer([text], [done.text]) <= 0.05


@pytest.mark.spec("J1", "H3")
async def test_transcripts_come_to_the_async_client_too(later: AsyncOpenAI, fox: bytes) -> None:
    said = await later.audio.transcriptions.create(model=ASR, file=("a.wav", fox))
    assert plain(said.text) == plain(FOX)
    stream = await later.audio.transcriptions.create(model=ASR, file=("a.wav", fox), stream=True)
    events = [event async for event in stream]
    assert plain(events[-1].text) == plain(FOX)
    text, english = whisper_base.SPOKEN["es"]
    file = ("a.wav", whisper_base.spoken(text, "es"))
    translated = await later.audio.translations.create(model=MULTILINGUAL, file=file)
    assert english <= set(plain(translated.text).split())


@pytest.mark.spec("J1", "H3", "L3")
def test_translation_needs_a_model_of_many_languages(client: OpenAI, fox: bytes) -> None:
    with pytest.raises(BadRequestError, match="multilingual") as caught:
        client.audio.translations.create(model=ASR, file=named(fox))
    assert caught.value.param == "model"


@pytest.mark.spec("J1", "H3")
def test_speech_in_another_language_is_transcribed_and_translated(client: OpenAI) -> None:
    text, english = whisper_base.SPOKEN["es"]
    raw = whisper_base.spoken(text, "es")
    audio = client.audio
    said = audio.transcriptions.create(
        model=MULTILINGUAL, file=named(raw), response_format="verbose_json"
    )
    assert said.language == "es" and wer([text], [said.text]) <= 0.3
    said = audio.translations.create(
        model=MULTILINGUAL, file=named(raw), response_format="verbose_json"
    )
    assert said.language == "es" and english <= set(plain(said.text).split())


@pytest.mark.spec("G1")
def test_speech_has_the_chat_model_behind_it_warm_its_prefix(
    graph: Graph, client: OpenAI, fox: bytes
) -> None:
    """Its replica of voice activity detection is new, because a replica that has heard speech tells
    of it again after half a minute only."""
    vad = "no replica listens"
    until(lambda: graph.get("/ready")["capabilities"]["vad"]["state"] == "scaled_to_zero", 60, vad)
    seen = graph.state()["sequence"]
    client.chat.completions.create(
        model="plain-chat",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=1,
        extra_body={"x_stay_warm": 20},
    )
    until(lambda: "load" in causes(graph, seen), 60, "its prefix is warm")
    posted(graph, "/v1/audio/vad", fox, VAD)
    until(lambda: "speech" in causes(graph, seen), 60, "it is warmed again")


def causes(graph: Graph, seen: int) -> list[str]:
    return [event["cause"] for event in told(graph, "prewarm", "plain-chat", seen)]


@pytest.mark.spec("H6", "J1")
@pytest.mark.parametrize("path", ["/v1/vad", "/v1/audio/vad"])
def test_speech_is_found_in_a_file(graph: Graph, fox: bytes, path: str) -> None:
    samples, rate = samples_of(fox)
    quiet = np.zeros(rate * 2, np.float32)
    said = posted(graph, path, wav(np.concatenate([quiet, samples, quiet]), rate), VAD)
    [only] = said["segments"]
    assert only["start"] == pytest.approx(2.0, abs=0.25)
    assert only["end"] == pytest.approx(2.0 + len(samples) / rate, abs=0.25)
    assert said["duration"] == pytest.approx(4.0 + len(samples) / rate, abs=0.01)


def posted(graph: Graph, path: str, raw: bytes, model: str) -> dict:
    body, kind = form(raw, model=model)
    request = urllib.request.Request(graph.url + path, body, {"content-type": kind})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict = json.load(answer)
    return found


@pytest.mark.spec("H3", "H4")
def test_spoken_question_is_heard_and_its_answer_is_spoken(client: OpenAI) -> None:
    question = heard(client, spoken(client, QUESTION)).strip()
    assert question == QUESTION
    answer = client.chat.completions.create(
        model="small-chat",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=48,
    )
    said = answer.choices[0].message.content
    assert said == ANSWER
    understood = heard(client, spoken(client, said))
    assert wer([ANSWER], [understood]) <= 0.1  # one word of eleven


@pytest.mark.spec("C11")
def test_voice_activity_prefetches_the_model_that_transcribes(
    graph: Graph, client: OpenAI, fox: bytes
) -> None:
    """By the declared pipeline, once that model was measured."""
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    seen = graph.state()["sequence"]
    posted(graph, "/v1/audio/vad", fox, VAD)
    heard(client, fox)
    until(lambda: told(graph, "estimate_error", ASR, seen), 60, "its size is measured")
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    seen = graph.state()["sequence"]
    posted(graph, "/v1/audio/vad", fox, VAD)
    [event] = until(lambda: told(graph, "model_preload", ASR, seen), 60, "it is prefetched")
    assert (event["after"], event["why"]) == (VAD, "pipeline")
    until(lambda: level(graph, ASR) == "device", 60, "it is resident before any request")


def told(graph: Graph, kind: str, model: str, after: int) -> list[dict]:
    """The events of a kind about a model, behind a sequence number."""
    events = [e for e in graph.events() if e["seq"] > after and e["kind"] == kind]
    return [event for event in events if event["model"] == model]


@pytest.mark.spec("L3")
def test_wrong_requests_about_sound_are_4xx_with_the_field(client: OpenAI, fox: bytes) -> None:
    speech, transcripts = client.audio.speech.create, client.audio.transcriptions.create
    for ask, field in (
        (lambda: speech(model=TTS, voice="unknown", input="Hello."), "voice"),
        (lambda: speech(model=TTS, voice="joe", input="..."), "input"),
        (lambda: speech(model=TTS, voice="joe", input="Hello.", speed=9), "speed"),
        (lambda: transcripts(model=ASR, file=named(b"x" * 1_000)), "file"),
        (lambda: transcripts(model=ASR, file=named(fox[:60])), "file"),
        (lambda: transcripts(model=ASR, file=named(fox), language="de"), "language"),
        (lambda: transcripts(model=ASR, file=named(b"x" * ((25 << 20) + 1))), "file"),
    ):
        with pytest.raises(BadRequestError) as caught:
            ask()
        assert caught.value.param == field
    with pytest.raises(NotFoundError, match="/v1/audio/speech"):
        transcripts(model=TTS, file=named(fox))
    assert plain(heard(client, fox)) == plain(FOX)


@pytest.mark.spec("J3", "H4")
def test_client_of_events_hears_of_the_load_of_a_voice(graph: Graph) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    body = {"model": TTS, "input": FOX, "stream_format": "sse", "response_format": "pcm"}
    request = urllib.request.Request(
        f"{graph.url}/v1/audio/speech",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        raw = answer.read().decode()
    assert raw.startswith(": phase=")
    assert json.loads(raw.rstrip().rsplit("data: ", 1)[1])["type"] == "speech.audio.done"
