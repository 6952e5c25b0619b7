"""The snippets of docs/python.md as one program."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets() -> list[str]:
    texts = SNIPPET.findall((ROOT / "docs" / "python.md").read_text())
    assert texts, "docs/python.md has no snippets"
    return [str(one) for one in texts]


def program() -> str:
    """Says before each snippet how many went before it."""
    parts = (f"print('\\nsnippet {number}')\n{one}" for number, one in enumerate(snippets()))
    return "\n".join(parts)
