"""Code of product, benchmarks and planted bugs uses no word that docs/glossary.md retires, in names
or in prose; of tests the names use none."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.style.sources import ROOT, broken_in, name_of, text_of

GLOSSARY = ROOT / "docs" / "glossary.md"
CODE = sorted(
    path
    for package in ("arbiter", "policies", "deployments", "models", "benchmarks", "tests/bugs")
    for path in (ROOT / package).rglob("*.py")
)
# Retired words that the code still holds. A word that has gone is taken off this list, and none is
# added.
NOT_YET: frozenset[str] = frozenset()


def rows_of(page: str) -> list[list[str]]:
    """Cells of each row of a table that begins with a word in bold."""
    lines = [line for line in page.splitlines() if line.startswith("| **")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


ROWS = rows_of(GLOSSARY.read_text())
# From 3.12 on the text of an f-string is a token of its own.
TEXTS = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
RETIRED = [word for row in ROWS for word in re.findall(r"`([^`]+)`", row[-1])]


def words_of(text: str) -> Iterator[str]:
    """Words of a name or a sentence, in lower case: `HeldModel` and `held_model` have two."""
    for run in re.findall(r"[A-Za-z]+", text):
        for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", run):
            yield part.lower()


def texts_of(source: str) -> Iterator[str]:
    """Names one by one, strings one by one, and comments that follow one another as one text."""
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment += token.string + "\n"
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield comment
            comment = ""
            if token.type in TEXTS:
                yield token.string
    yield comment


@cache
def used(path: Path) -> frozenset[str]:
    """Words and pairs of words in a file and in its own name."""
    found = set(words_of(name_of(path)))
    for text in texts_of(text_of(path)):
        words = list(words_of(text))
        found |= {*words, *(f"{one} {two}" for one, two in pairwise(words))}
    return frozenset(found)


def may_hold(text: str) -> set[str]:
    """Retired words that may be in a text, and a few that are not: to cut a file into names and
    sentences takes long, and is done only where there is one of these."""
    lower = text.lower()
    return {
        entry
        for entry in RETIRED
        if all(word in lower for word in entry.split()) and form_of(entry).search(text)
    }


@cache
def form_of(entry: str) -> re.Pattern[str]:
    """A word that is no part of another, as `words_of` parts them; of a pair no letter between."""
    words = (
        rf"(?:(?<![a-z]){word}|{word.capitalize()}|{word.upper()})(?![a-z])"
        for word in entry.split()
    )
    return re.compile("[^A-Za-z]*".join(words))


def retired_in(path: Path) -> set[str]:
    return used(path) & set(RETIRED) if may_hold(f"{name_of(path)} {text_of(path)}") else set()


def test_glossary_has_three_columns_and_says_each_word_once() -> None:
    assert len(ROWS) > 50
    assert all(len(row) == 3 and row[1].endswith(".") for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)
    assert len(set(RETIRED)) == len(RETIRED)


def test_retired_words_are_lower_case_words_or_pairs() -> None:
    assert RETIRED
    assert all(re.fullmatch(r"[a-z]+( [a-z]+)?", word) for word in RETIRED)


def test_code_uses_no_retired_word() -> None:
    broken = broken_in(CODE, lambda path: retired_in(path) - NOT_YET)
    assert not broken, "docs/glossary.md has the words to use instead"


def retired_in_names(path: Path) -> list[str]:
    """Names of tests with a retired word: they are links of docs/behaviours.md."""
    names = re.findall(r"\bdef (test_\w+)", text_of(path))
    return [name for name in names if any(form_of(entry).search(name) for entry in RETIRED)]


def test_names_of_tests_use_no_retired_word() -> None:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(tests) > 100
    broken = broken_in(tests, retired_in_names)
    assert not broken, "docs/glossary.md has the words to use instead"


def test_words_not_gone_yet_are_retired_and_still_there() -> None:
    assert not NOT_YET - set(RETIRED)
    everywhere = set().union(*(retired_in(path) for path in CODE))
    assert not NOT_YET - everywhere, "gone from the code: take them off NOT_YET"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("class MindReader: ...", "mind"),
        ("self.old_mind = 1", "mind"),
        ("MIND_S = 2", "mind"),
        ('"""Reads the mind."""', "mind"),
        ("x = f'of {a}: its mind'", "mind"),
        ("# what one\n# that comes finds", "one that"),
    ],
)
def test_retired_word_is_found_in_names_and_prose(source: str, word: str) -> None:
    texts = [" ".join(words_of(text)) for text in texts_of(source)]
    assert any(word in text for text in texts)
    assert word in may_hold(source)


def test_retired_word_is_found_in_the_name_of_a_test(tmp_path: Path) -> None:
    file, names = tmp_path / "test_it.py", ["test_nobody_waits", "test_none_that_waits"]
    file.write_text("".join(f"async def {name}(): ...\n" for name in names))
    assert retired_in_names(file) == names[:1]


@pytest.mark.parametrize("source", ["remind = 1", "# of another kind\nthat = 2", "'reminder'"])
def test_part_of_another_word_is_not_found(source: str) -> None:
    words = [word for text in texts_of(source) for word in words_of(text)]
    assert not {"mind", "one that"} & set(words)
