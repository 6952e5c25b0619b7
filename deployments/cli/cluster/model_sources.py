"""What a source of a model is, for `arbiter init`: its capability by its files, its bytes by their
headers.

A hub id is looked for in the local cache of the hub's clients, then asked of the hub, unless
HF_HUB_OFFLINE is set. The cache's layout: huggingface.co/docs/huggingface_hub/guides/manage-cache;
the hub's answer: huggingface.co/docs/hub/api, and `ModelInfo` of huggingface_hub.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.core.records import estimates
from arbiter.units import Bytes
from deployments.cli.output import CommandError
from deployments.config.load_plan import resolve
from deployments.config.model_files import weights_bytes
from deployments.config.safetensors_header import ITEM_BYTES
from deployments.config.schema import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB = "https://huggingface.co"
HUB_S = 10.0  # for one answer of the hub
WEIGHTS = (".safetensors", ".onnx", ".bin", ".gguf")

# The capability of a model by the end of the class name in config.json's `architectures`; the first
# row that fits counts. A model with a `vision_config` is one of vision.
BY_CLASS = (
    ("ForCausalLM", "chat"),
    ("LMHeadModel", "chat"),
    ("ForSequenceClassification", "rerank"),
    ("ForMaskedLM", "embedding"),
    ("Model", "embedding"),
)
TO_CT2 = "ct2-transformers-converter --model SOURCE --output_dir FOLDER --copy_files tokenizer.json"


@dataclass(frozen=True, slots=True)
class Source:
    """One model that is to be served. `what`: the facts of it, for a comment."""

    name: str
    source: str
    capability: str
    weights_bytes: Bytes | None  # None: not known before a load
    context_tokens: int | None  # the most that it reads at once
    what: str


def look(name: str, source: str, capability: str = "") -> Source:
    """Finds out what a source is. `capability`: the person's choice; empty: the files decide.
    Raises CommandError that names the source."""
    folder = _folder(name, source)
    if folder is not None:
        return _of_folder(name, source, folder, capability)
    return _of_hub(name, source, capability)


def _folder(name: str, source: str) -> Path | None:
    """Where its files are; None: nowhere on this machine, but it may be an id. Raises
    CommandError."""
    try:
        path = Path(resolve(source)).expanduser()
    except ConfigError as error:
        raise CommandError(f"{name}: {error}") from error
    if path.exists():
        return path
    if source.startswith(("/", ".", "~")) or not HUB_ID.fullmatch(source):
        raise CommandError(
            f"{name}: no folder {source}, and no id of a hub, which is ORGANISATION/MODEL;"
            " `made:NAME` and `package:NAME` are sources as well"
        )
    return _cached(source)


def _cached(hub_id: str) -> Path | None:
    """The snapshot of the main branch in the local cache."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


def _of_folder(name: str, source: str, folder: Path, capability: str) -> Source:
    config = _json(folder / "config.json") if folder.is_dir() else {}
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
    by_config, kind = _kind(config, files)
    if not by_config and not capability:
        raise CommandError(f"{name}: {folder}: {_unknown(config, files)}")
    _refuse_another(name, source, capability, by_config, kind)
    try:
        size: Bytes | None = _bytes(folder)
    except ConfigError as error:
        raise CommandError(f"{name}: {error}") from error
    if not size:
        raise CommandError(
            f"{name}: {folder} has no weights, which are files of {', '.join(WEIGHTS)};"
            " is the download complete?"
        )
    where = "its headers" if any(f.endswith(".safetensors") for f in files) else "its files"
    what = f"{kind or 'as you say'}; {{size}} of weights by {where}"
    if Path(source).expanduser().exists():
        source = str(Path(source).expanduser().resolve())  # whatever folder it is served from
    return Source(name, source, capability or by_config, size, _context(config), what)


def _of_hub(name: str, source: str, capability: str) -> Source:
    card = _ask_hub(name, source)
    config: dict[str, Any] = card.get("config", {})
    files = [row["rfilename"] for row in card.get("siblings", ())]
    by_config, kind = _kind(config, files)
    _refuse_another(name, source, capability, by_config, kind)
    if not by_config and not capability:
        why = _unknown(config, files) if card else "it is not in the cache, and no hub answers"
        raise CommandError(f"{name}: {source}: {why}; write it as `--model chat:{name}={source}`")
    size, where = _size_at_hub(source, card)
    what = f"{{size}} of weights by {where}" if size else "its size is learned at the first load"
    return Source(
        name, source, capability or by_config, size, None, f"{kind or 'as you say'}; {what}"
    )


def _size_at_hub(source: str, card: Mapping[str, Any]) -> tuple[Bytes | None, str]:
    """Returns the size in bytes in the order of A17, and by what it is known: the headers, which
    the hub has read of a model that lies at the top of its repository, else the sizes of files,
    else the name."""
    counts = (card.get("safetensors") or {}).get("parameters") or {}
    if counts and counts.keys() <= ITEM_BYTES.keys():
        return Bytes(sum(ITEM_BYTES[kind] * count for kind, count in counts.items())), "its headers"
    listed = {row["rfilename"]: row.get("size") or 0 for row in card.get("siblings", ())}
    # `consolidated` ones are the same tensors once more, and so are those of other endings.
    files = {file: size for file, size in listed.items() if "consolidated" not in file}
    tensors = {file: size for file, size in files.items() if file.endswith(".safetensors")}
    if size_bytes := estimates.of_files(tensors or files):
        return size_bytes, "the sizes of its files"
    return estimates.of_name(source), "the number in its name"


def _ask_hub(name: str, source: str) -> dict[str, Any]:
    """What the hub says of a model; empty where none can be reached. Raises CommandError."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return {}
    hub = os.environ.get("HF_ENDPOINT") or HUB
    token = os.environ.get("HF_TOKEN")
    head = {"authorization": f"Bearer {token}"} if token else {}
    try:
        url = f"{hub}/api/models/{source}"
        answer = httpx.get(url, params={"blobs": "true"}, headers=head, timeout=HUB_S)
    except httpx.HTTPError:
        return {}
    if answer.status_code in (401, 403, 404):
        raise CommandError(
            f"{name}: {hub} has no model {source}, or shows it only to those with a token in"
            " HF_TOKEN"
        )
    try:
        body = answer.json() if answer.is_success else {}
    except ValueError:  # the page of a proxy or of a login in between: no hub answers
        return {}
    return body if isinstance(body, dict) else {}


def _kind(config: Mapping[str, Any], files: Iterable[str]) -> tuple[str, str]:
    """Capability, and by what; empty where nothing says."""
    names = set(files)
    if "model_index.json" in names:
        return "image", "a pipeline of diffusers"
    if any(name.endswith(".onnx.json") for name in names):
        return "tts", "a voice of Piper"
    if "model.bin" in names and {"vocabulary.json", "vocabulary.txt"} & names:
        return "asr", "Whisper for CTranslate2"
    if names & {"modules.json", "sentence_bert_config.json"}:
        return "embedding", "a model of sentence-transformers"
    for kind in config.get("architectures") or ():
        if capability := _by_class(kind, config):
            return capability, kind
    return "", ""


def _by_class(kind: str, config: Mapping[str, Any]) -> str:
    if kind.startswith("Whisper"):
        return ""
    if "vision_config" in config and kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return "vision"
    return next((name for ending, name in BY_CLASS if kind.endswith(ending)), "")


def _unknown(config: Mapping[str, Any], files: Iterable[str]) -> str:
    kinds = ", ".join(config.get("architectures") or ())
    if "Whisper" in kinds:
        return f"{kinds} is served in CTranslate2's form: {TO_CT2}"
    if not config:
        return f"no config.json among {', '.join(sorted(files)) or 'no files'}"
    endings = ", ".join(ending for ending, _ in BY_CLASS)
    shown = kinds or "no `architectures`"
    return f"config.json names {shown}, of which no capability is known (those end in {endings})"


def _refuse_another(name: str, source: str, wanted: str, by_config: str, kind: str) -> None:
    """Raises CommandError."""
    if wanted and by_config and wanted != by_config:
        raise CommandError(f"{name}: {source} is for {by_config} ({kind}), not for {wanted}")


def _bytes(folder: Path) -> Bytes:
    """Returns the weights' bytes by headers, else by the sizes of files. Raises ConfigError."""
    if folder.is_dir() and not any(folder.rglob("*.safetensors")):
        files = (p for p in folder.rglob("*") if p.is_file() and p.suffix in WEIGHTS)
        return Bytes(sum(p.stat().st_size for p in files))
    return weights_bytes(folder)


def _context(config: Mapping[str, Any]) -> int | None:
    context_tokens = (config.get("text_config") or config).get("max_position_embeddings")
    return context_tokens if isinstance(context_tokens, int) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
