"""What the files of a voice say of it, read without its engine: Piper's format, a .onnx file with a
.onnx.json beside it; and Kokoro's, a .onnx file with its vocabulary and a file of styles."""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from deployments.config.load_plan import resolve
from deployments.config.model_section import ESPEAK, ModelConfig
from deployments.config.schema import ConfigError

ESPEAK_DEFAULT = "en-us"


def voice_file(source: Path) -> Path:
    """The .onnx file of a voice, from its path or that of its folder. Raises ConfigError."""
    files = [source] if source.suffix == ".onnx" else sorted(source.glob("*.onnx"))
    if not files or not describing(files[0]).is_file():
        raise ConfigError(f"{source}: no .onnx file with its .onnx.json beside it")
    return files[0]


def describing(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def speakers(file: Path, description: dict[str, Any]) -> dict[str, int]:
    """Names and numbers of those that one file speaks as."""
    alone = {description.get("dataset") or file.stem: 0}
    numbers: dict[str, int] = description.get("speaker_id_map") or alone
    return numbers


class KokoroFiles(NamedTuple):
    """The files of one model of Kokoro's class, in one folder."""

    graph: Path
    styles: Path  # .npz, also named .bin: one array for each voice
    vocabulary: Path  # config.json, with `vocab`


def kokoro_files(source: Path) -> KokoroFiles:
    """Finds the files by the path of the graph or of its folder. Raises ConfigError."""
    folder = source.parent if source.suffix == ".onnx" else source
    graphs = [source] if source.suffix == ".onnx" else sorted(folder.glob("*.onnx"))
    styles = sorted(file for ending in ("npz", "bin") for file in folder.glob(f"*.{ending}"))
    vocabulary = folder / "config.json"
    for what, files in (("graph (.onnx)", graphs), ("file of voices (.npz or .bin)", styles)):
        if len(files) != 1:
            raise ConfigError(f"{source}: there must be one {what}, not {len(files)}")
    if not vocabulary.is_file():
        raise ConfigError(f"{source}: no config.json with the model's vocabulary")
    return KokoroFiles(graphs[0], styles[0], vocabulary)


def style_names(styles: Path) -> list[str]:
    """The names of voices in a file of styles. Raises OSError, zipfile.BadZipFile."""
    with zipfile.ZipFile(styles) as packed:
        return [name.removesuffix(".npy") for name in packed.namelist()]


def voices(name: str, model: ModelConfig) -> list[str]:
    """Names that `voice` of a request may have, as far as this node can know them."""
    further: dict[str, str] = model.engine_args.get("voices", {})
    if model.source == ESPEAK:
        return [ESPEAK_DEFAULT, *further]
    for read in (_of_piper, _of_kokoro):
        try:
            return [*read(Path(resolve(model.source))), *further]
        except (ConfigError, OSError, ValueError, zipfile.BadZipFile):
            continue
    return [name, *further]  # another node has it, or another engine speaks


def _of_piper(source: Path) -> list[str]:
    file = voice_file(source)
    return list(speakers(file, json.loads(describing(file).read_text())))


def _of_kokoro(source: Path) -> list[str]:
    return style_names(kokoro_files(source).styles)
