"""Secrets that must not leave: patterns of keys and tokens, looked for in every text of a body.

Each pattern begins with letters that its issuer puts in front of every such secret, so that it is
fast and finds little else. A text that cannot be searched in time counts as one with a secret. The
search is for accidents: a person who means to send a secret can write it in another way.
"""

import time
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache

# Not within a word; the letter of an escape, as in JSON within a text (`\\n`), is no word.
START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf]))"
# Name, and pattern, as their issuers and GitHub's secret scanning document them.
PATTERNS = (
    ("a private key", r"-----BEGIN (?:[A-Z]{2,10} ){0,3}PRIVATE KEY"),
    ("a key of this system", START + r"arb-[0-9a-f]{12}-[A-Za-z0-9_-]{43}"),
    ("an API key (sk-)", START + r"sk-[A-Za-z0-9_-]{20,}"),
    ("an API key (sk_live_)", START + r"[rs]k_live_[A-Za-z0-9]{16,}"),
    ("a key of AWS", START + r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])"),
    ("a token of GitHub", START + r"gh[pousr]_[A-Za-z0-9]{36}"),
    ("a token of GitHub", START + r"github_pat_[A-Za-z0-9_]{40,}"),
    ("a token of GitLab", START + r"glpat-[A-Za-z0-9_-]{20,}"),
    ("a token of Slack", START + r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("a key of Google", START + r"AIza[A-Za-z0-9_-]{35}"),
    ("a token of Hugging Face", START + r"hf_[A-Za-z0-9]{30,}"),
    ("a signed token (JWT)", START + r"eyJ[\w-]{8,2048}+\.eyJ[\w-]{8,}+\.[\w-]{8}"),
    ("a password in a URL", r"://[^/\s:@]{1,64}:[^/\s:@]{3,128}@"),
)
SEARCH_S = 1.0  # of all patterns over one body, in which the front waits; 4 MB take 0.15 s
UNSEARCHED = "a text that could not be searched in time"


class Secrets:
    """The patterns of one table."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        """`own`: further patterns. Raises regex.error."""
        import regex

        named_patterns = (
            *PATTERNS,
            *((f"what `remotes.secrets` lists ({n})", p) for n, p in enumerate(own)),
        )
        self._patterns = tuple((name, regex.compile(pattern)) for name, pattern in named_patterns)

    def found(self, texts: Iterable[str], search_s: float = SEARCH_S) -> str | None:
        """Returns the name of the first pattern that is found in the texts, or UNSEARCHED; None
        where none is found."""
        joined = "\n".join(plain(text) for text in texts)
        end_s = time.monotonic() + search_s
        try:
            for name, pattern in self._patterns:
                left_s = max(1e-6, end_s - time.monotonic())
                if pattern.search(joined, timeout=left_s):
                    return name
        except TimeoutError:
            return UNSEARCHED
        return None


def plain(text: str) -> str:
    """Returns the text without letters that only look like others, and without characters that are
    not seen: both come with copied text and would hide a secret."""
    if text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text)
    return folded.translate(_unseen())


@cache
def _unseen() -> dict[int, None]:
    """Soft hyphens, joiners, marks of direction: category Cf of the first plane."""
    return {n: None for n in range(0x10000) if unicodedata.category(chr(n)) == "Cf"}
