"""What the files of a voice say of it, read without its engine: Piper's format, a .onnx file with a
.onnx.json beside it."""

import json
from pathlib import Path
from typing import Any

from deployments.config.load_plan import resolve
from deployments.config.schema import ESPEAK, ConfigError, ModelConfig

ESPEAK_DEFAULT = "en-us"


def voice_file(source: Path) -> Path:
    """The .onnx file of a voice, from its path or that of its folder. Raises ConfigError."""
    found = [source] if source.suffix == ".onnx" else sorted(source.glob("*.onnx"))
    if not found or not describing(found[0]).is_file():
        raise ConfigError(f"{source}: no .onnx file with its .onnx.json beside it")
    return found[0]


def describing(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def speakers(file: Path, description: dict[str, Any]) -> dict[str, int]:
    """Names and numbers of those that one file speaks as."""
    alone = {description.get("dataset") or file.stem: 0}
    found: dict[str, int] = description.get("speaker_id_map") or alone
    return found


def voices(name: str, model: ModelConfig) -> list[str]:
    """Names that `voice` of a request may have, as far as this node can know them."""
    further: dict[str, str] = model.engine_args.get("voices", {})
    if model.source == ESPEAK:
        return [ESPEAK_DEFAULT, *further]
    try:
        file = voice_file(Path(resolve(model.source)))
        known = list(speakers(file, json.loads(describing(file).read_text())))
    except (ConfigError, OSError, ValueError):  # another node has it, or another engine speaks
        known = [name]
    return [*known, *further]
