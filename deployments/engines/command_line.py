"""Engine arguments as words of a command line, for engines that read theirs from one."""

import json
from typing import Any


def flag(name: str) -> str:
    """`max_model_len` is `--max-model-len`."""
    return "--" + name.replace("_", "-")


def words(name: str, value: Any) -> list[str]:
    """The words for one argument. None and empty collections leave the program's default; `true` is
    the bare flag and `false` its `--no-` form; a list gives one word for each item, a mapping is
    JSON."""
    if value is None or value in ({}, []):
        return []
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, list):
        return [flag(name), *map(str, value)]
    return [flag(name), json.dumps(value) if isinstance(value, dict) else str(value)]
