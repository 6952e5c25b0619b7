"""A Whisper model of many languages on vLLM, with real weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deployments.config.engine_kinds import ENGINES
from tests.support import whisper_base
from tests.support.engine_host import Child, ZygoteUnderTest, served
from tests.support.speech import form, plain, post, samples_of, transcribe, wav, wer
from tests.support.whisper_base import SPOKEN, spoken
from tests.support.whisper_checkpoint import convert

MIB = 1 << 20


@pytest.fixture(scope="module")
def hears(engines: ZygoteUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder = tmp_path_factory.mktemp("whisper")
    model = convert(whisper_base.make(folder), folder / "checkpoint")
    args = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 256 * MIB}
    config = {"model": str(model), "served_name": "whisper", "engine_args": args}
    with served(engines, "hears", ENGINES["vllm"].entry, config) as child:
        yield child


def verbose(child: Child, raw: bytes, path: str = "transcriptions", **fields: str) -> Any:
    fields = {"response_format": "verbose_json", **fields}
    answer = post(child, f"/v1/audio/{path}", *form(raw, **fields))
    assert answer.status == 200, (answer, child.log[-2000:])
    return answer.json()


@pytest.mark.spec("H3", "J1")
def test_language_is_detected_written_as_spoken_and_translated_several_at_once(
    hears: Child,
) -> None:
    sounds = {language: spoken(text, language) for language, (text, _) in SPOKEN.items()}

    def both(language: str) -> None:
        text, english = SPOKEN[language]
        raw = sounds[language]
        heard, translated = verbose(hears, raw), verbose(hears, raw, "translations")
        for body, task in ((heard, "transcribe"), (translated, "translate")):
            assert (body["task"], body["language"]) == (task, language)
            times = [(s["start"], s["end"]) for s in body["segments"]]
            assert times == sorted(times) and 0 <= times[0][0] and times[-1][1] <= body["duration"]
        assert english <= set(plain(translated["text"]).split())
        assert wer([text], [heard["text"]]) <= 0.3  # espeak-ng is hard to understand

    with ThreadPoolExecutor(len(SPOKEN)) as pool:
        list(pool.map(both, SPOKEN))


@pytest.mark.spec("H3", "D1")
def test_model_that_slept_hears_the_same(hears: Child) -> None:
    raw = spoken(SPOKEN["de"][0], "de")
    before = verbose(hears, raw)
    assert hears.call("POST", "/control/sleep")[0] == 200
    assert hears.call("POST", "/control/wake")[1]["verified"] is True
    assert verbose(hears, raw) == before


@pytest.mark.spec("H3", "J1")
def test_answer_has_each_form_and_is_streamed(hears: Child) -> None:
    raw = spoken(SPOKEN["es"][0], "es")
    whole = transcribe(hears, raw, language="es").json()["text"]
    assert (
        transcribe(hears, raw, language="es", response_format="text").body.decode() == whole + "\n"
    )
    subtitles = transcribe(hears, raw, language="es", response_format="srt").body.decode()
    assert subtitles.startswith("1\n00:00:0") and " --> " in subtitles
    streamed = transcribe(hears, raw, language="es", stream="true").body.decode()
    assert "transcript.text.delta" in streamed and "transcript.text.done" in streamed


@pytest.mark.spec("H3")
def test_long_sound_is_heard_in_pieces_whose_times_go_on(hears: Child) -> None:
    """Forty seconds: silence, and a sentence behind the window of the model."""
    samples, rate = samples_of(spoken(SPOKEN["de"][0], "de"))
    raw = wav(np.concatenate([np.zeros(36 * rate, np.float32), samples]), rate)
    body = verbose(hears, raw, language="de", vad_filter="false")
    assert body["segments"][-1]["end"] > 36
    assert "berlin" in plain(body["text"])


@pytest.mark.spec("H3", "L2", "L3")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "yue"}, "language"),
        ({"language": "0.00"}, "language"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "word"},
         "timestamp_granularities"),
        ({"temperature": "2"}, "temperature"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_its_field(
    hears: Child, fields: dict[str, str], param: str
) -> None:
    answer = transcribe(hears, spoken(SPOKEN["es"][0], "es"), **fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.spec("L2")
def test_playlist_that_names_another_file_is_refused_unopened(hears: Child) -> None:
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    answer = transcribe(hears, playlist)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "file")


@pytest.mark.spec("H3", "L3")
def test_prompt_that_spells_tokens_is_words_only(hears: Child) -> None:
    raw = spoken(SPOKEN["de"][0], "de")
    prompt = "<|endoftext|><|en|>" * 400
    assert "berlin" in plain(transcribe(hears, raw, language="de", prompt=prompt).json()["text"])
