"""Texts in clauses, names of voices, and phrases that are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.engines.asgi import BadField
from deployments.engines.audio.espeak import Espeak
from deployments.engines.audio.kokoro import read_styles, read_vocabulary
from deployments.engines.audio.vits import PhraseCache, parse
from deployments.engines.audio.voices import (
    CLAUSE_CHARACTERS,
    EspeakVoice,
    VitsVoice,
    clauses_of,
    named,
    run_phonemes,
    runs,
)
from deployments.engines.protocol import EngineLoadFailed


@pytest.fixture(scope="module")
def espeak() -> Espeak:
    return Espeak()


@pytest.mark.spec("H4")
def test_clauses_are_sentences_and_lose_no_word() -> None:
    text = 'It is 3.14 at 9:30, she said. "Really?" Yes! One; two: three\nfour'
    found = list(clauses_of(text))
    assert found == [
        "It is 3.14 at 9:30, she said.",
        '"Really?" Yes!',
        "One;",
        "two:",
        "three\nfour",
    ]
    assert " ".join(found).split() == text.split()


@pytest.mark.spec("H4")
@pytest.mark.parametrize("text", ["word " * 200, "word, " * 200, "w" * 1_000, "a" * 149 + " b"])
def test_long_sentences_are_divided_between_words_where_there_are_any(text: str) -> None:
    found = list(clauses_of(text))
    assert all(0 < len(clause) <= CLAUSE_CHARACTERS for clause in found)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    if " " in text:
        assert " ".join(found).split() == text.split()


@pytest.mark.spec("H4")
def test_clause_of_many_phonemes_is_divided_between_words_where_there_are_any() -> None:
    border = [7, 0]
    clause = [1, 0, 2, 0, *border] * 3 + [1, 0] * 5 + [1, 7, 3, 0]
    found = list(runs(clause, 8, border))
    assert [len(run) for run in found] == [6, 6, 6, 8, 6]
    assert [one for run in found for one in run] == clause
    assert list(runs(clause, 100, border)) == [clause] and not list(runs([], 8, border))
    assert [len(run) for run in runs(clause, 10, [])] == [10, 10, 10, 2]
    assert [run_phonemes(speed) for speed in (0.25, 1.0, 4.0)] == [50, 200, 800]


def test_text_of_nothing_has_no_clauses() -> None:
    assert list(clauses_of(" \n ")) == []


@pytest.mark.spec("H4")
def test_voice_is_found_by_name_or_further_name_and_the_first_is_the_default() -> None:
    names = {"ann": "ann", "ben": "ben", "alloy": "ben"}
    assert [named(asked, names) for asked in ("", "ann", "alloy")] == ["ann", "ann", "ben"]
    with pytest.raises(BadField, match="there is: alloy, ann, ben") as caught:
        named("cid", names)
    assert caught.value.param == "voice"


@pytest.mark.spec("H4")
def test_espeak_speaks_signs_by_their_names_and_nothing_where_it_has_no_sound(
    espeak: Espeak,
) -> None:
    voice = EspeakVoice(espeak, {})
    voice.name_of("")
    assert [voice.clause(text) for text in ("%", "\N{GRINNING FACE}", "5")] == [
        "%",
        "\N{GRINNING FACE}",
        "5",
    ]
    assert [voice.clause(text) for text in ("\N{ZERO WIDTH SPACE}", "...", "\ua9e6")] == [None] * 3


@pytest.mark.spec("H4", "L3")
def test_further_name_of_no_speaker_ends_the_load(tmp_path: Path, espeak: Espeak) -> None:
    said = {
        "phoneme_id_map": {},
        "audio": {"sample_rate": 22_050},
        "espeak": {"voice": "en-us"},
        "speaker_id_map": {"ann": 0, "ben": 1},
    }
    (tmp_path / "two.onnx").touch()
    (tmp_path / "two.onnx.json").write_text(json.dumps(said))
    with pytest.raises(EngineLoadFailed, match=r"'alloy' what is no speaker of .*two\.onnx"):
        VitsVoice(tmp_path, espeak, {"voices": {"alloy": "cid"}}, 1)


@pytest.mark.spec("H4")
def test_only_configured_phrases_are_kept_and_their_bytes_are_bounded() -> None:
    kept = PhraseCache(["a", "b", "c"], most_bytes=1_000)
    sound = np.zeros(100, np.float32)  # 400 bytes
    kept.keep(("x", "joe", 1.0), sound)
    assert kept.get(("x", "joe", 1.0)) is None and kept.size_bytes == 0
    kept.keep(("a", "joe", 1.0), sound)
    kept.keep(("b", "joe", 1.0), sound)
    assert kept.get(("a", "joe", 1.0)) is sound  # now b was said longest ago
    kept.keep(("c", "joe", 1.0), sound)
    assert kept.get(("b", "joe", 1.0)) is None and kept.get(("a", "joe", 1.0)) is sound
    assert kept.get(("a", "joe", 2.0)) is None and kept.size_bytes == 800
    kept.keep(("b", "joe", 1.0), np.zeros(1_000, np.float32))
    assert kept.size_bytes == 800


def test_control_characters_and_halves_of_pairs_are_not_spoken() -> None:
    assert parse(b'{"input": "a\\u0000b\\ud800c\\nd"}').text == "a b c\nd"


@pytest.mark.spec("H4", "L3")
@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({}, "no voices"),
        ({"ann": np.zeros((5, 1, 256))}, "'ann' is not float32"),
        ({"ann": np.zeros((5, 256), np.float32)}, "'ann' is not float32"),
        ({"ann": np.zeros((0, 1, 256), np.float32)}, "'ann' is not float32"),
        ({"ann": np.array([{}], object)}, "no file of styles .*allow_pickle"),
    ],
)
def test_file_of_styles_is_arrays_of_the_model_s_shape_and_no_pickle(
    tmp_path: Path, arrays: dict[str, Any], why: str
) -> None:
    file = tmp_path / "voices.npz"
    np.savez(file, **arrays)
    with pytest.raises(EngineLoadFailed, match=why):
        read_styles(file)


@pytest.mark.spec("H4", "L3")
def test_broken_or_huge_files_of_a_voice_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "voices.npz"
    file.write_bytes(b"PK no zip")
    with pytest.raises(EngineLoadFailed, match=r"voices\.npz: no file of styles"):
        read_styles(file)
    np.savez(file, ann=np.zeros((5, 1, 256), np.float32))
    assert read_styles(file)["ann"].shape == (5, 1, 256)
    monkeypatch.setattr("deployments.engines.audio.kokoro.MOST_STYLES_BYTES", 5_000)
    with pytest.raises(EngineLoadFailed, match="more than 5000"):
        read_styles(file)
    for text in ("{}", "[]", '{"vocab": {"a": "x"}}', "no json"):
        file.write_text(text)
        with pytest.raises(EngineLoadFailed, match="no `vocab`"):
            read_vocabulary(file)
