"""Secrets that are found, however they are written, and what is none."""

import json

import pytest

from deployments.remotes.privacy import UNSEARCHED, Secrets

# In two halves, so that no scanner of this repository finds them.
WRITTEN = [
    "-----BEGIN RSA PRIV" + "ATE KEY-----",
    "-----BEGIN OPENSSH PRIV" + "ATE KEY-----",
    "arb-0123456789ab-" + "x" * 43,
    "sk-" + "proj-" + "a1B2" * 6,
    "sk_" + "live_" + "a1B2" * 6,
    "AKIA" + "ABCDEFGHIJ234567",
    "ghp_" + "a1B2" * 9,
    "github_" + "pat_" + "a1B2" * 12,
    "glpat-" + "a1B2" * 6,
    "xoxb-" + "1234567890-abcdef",
    "AIza" + "a1B2C" * 7,
    "hf_" + "a1B2" * 9,
    "eyJhbGciOiJI." + "eyJzdWIiOiIx.c2lnbmF0dXJl",
    "postgres://ann:" + "hunter22@db/app",
]


@pytest.mark.spec("J5")
@pytest.mark.parametrize("secret", WRITTEN)
def test_a_secret_is_found_in_the_middle_of_words(secret: str) -> None:
    secrets = Secrets()
    for text in (secret, f"it is {secret}.", f'{{"key":"{secret}"}}', f"\n{secret}\n"):
        found = secrets.found(["before", text, "after"])
        assert found and secret not in found


@pytest.mark.spec("J5")
@pytest.mark.parametrize("secret", WRITTEN)
def test_a_secret_is_found_in_json_within_a_text(secret: str) -> None:
    for before in ("keys:\n", "\t", "\r\n", "\b", "\f"):
        assert Secrets().found([json.dumps({"c": before + secret})])


@pytest.mark.spec("J5")
def test_letters_that_look_alike_and_letters_unseen_hide_nothing() -> None:
    secret = "AKIA" + "ABCDEFGHIJ234567"
    wide = "".join(chr(ord(letter) + 0xFEE0) for letter in secret)
    assert Secrets().found([wide]) and Secrets().found([secret[:6] + "\u200b" + secret[6:]])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task-oriented risk-free desk-",
        "sk-ip this",
        "AKIA is no key",
        "http://a:80/x@y",
        "eyJ.",
    ],
)
def test_common_words_are_no_secrets(text: str) -> None:
    assert Secrets().found([text]) is None


@pytest.mark.spec("J5")
def test_a_search_that_takes_too_long_counts_as_found() -> None:
    slow = Secrets([r"(a|aa)+$"])
    assert slow.found(["a" * 60 + "b"], search_s=0.05) == UNSEARCHED
    assert Secrets([r"ACME-\d{4}"]).found(["it is ACME-1234"]) == "what `remotes.secrets` lists (0)"
