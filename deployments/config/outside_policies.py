"""Policies of other packages: `module:function` in place of a name of `policies`."""

import importlib
from collections.abc import Callable
from typing import Any

from arbiter.core.settings import Settings


def imported(path: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises ValueError that says what is not there."""
    module, _, function = path.partition(":")
    try:
        policy: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path!r}: {error}") from None
    if not callable(policy):
        raise ValueError(f"{path!r} is no function")
    return policy


def outside(settings: Settings) -> dict[str, Callable[..., Any]]:
    """The policies of other packages that the settings name, by that name. Raises ValueError."""
    return {path: imported(path) for path in (settings.evict, settings.admit) if ":" in path}
