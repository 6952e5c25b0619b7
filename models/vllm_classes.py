"""What vLLM has to know of the classes of the default models, looked up ahead.

vLLM inspects each class in a process of its own, which imports all of vLLM (40 to 80 s on a busy
machine), and keeps the result in its cache. Without this the first request for a class waits for
it.
"""

import importlib.metadata
import json
from pathlib import Path

CLASSES = (
    "LlamaForCausalLM",
    "BertModel",
    "BertForSequenceClassification",
    "Idefics3ForConditionalGeneration",
)
STAMP = "vllm_classes.json"


def inspect(folder: Path) -> None:
    """Has vLLM inspect its classes, once for each version of vLLM; `folder` keeps which version
    that was."""
    if (seen := _stamp()) == _read(folder):
        return
    from vllm.model_executor.models import registry

    # vLLM starts those processes so that its own touches no GPU. This one ends soon and computes
    # nothing, so it imports vLLM once for all classes.
    start_process = registry._run_in_subprocess
    registry._run_in_subprocess = lambda look: look()
    try:
        for name in CLASSES:
            registry.ModelRegistry.models[name].inspect_model_cls()
    finally:
        registry._run_in_subprocess = start_process
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP).write_text(json.dumps(seen))


def _stamp() -> dict[str, object]:
    # vLLM has another name in its build without CUDA.
    names = importlib.metadata.packages_distributions()["vllm"]
    versions = sorted(f"{name} {importlib.metadata.version(name)}" for name in set(names))
    return {"vllm": versions, "classes": list(CLASSES)}


def _read(folder: Path) -> object:
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
