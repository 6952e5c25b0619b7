"""LoRA adapters of pictures, by name from the same kind of catalogue as those of text.

PEFT's form: `adapter_config.json` and `adapter_model.safetensors`, for linear modules of the
denoiser (the UNet or the transformer). They are copied, hashed and checked before they are loaded
(deployments.adapters.store); a pipeline holds as many as it has slots, the last used ones.
"""

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from deployments.adapters.catalogue import CONFIG, WEIGHTS, home_of
from deployments.adapters.store import CheckedAdapters, EngineCatalogue
from deployments.engines.protocol import Config

_PREFIX = "base_model.model."  # PEFT's, before the module's name in the base
# Of the adapter's configuration, what decides the scale of its matrices; the rest is checked.
_SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


class AdapterResolver:
    """Names to checked folders, for one engine."""

    def __init__(self, config: Config) -> None:
        """`config["adapters"]`: what the load plan made. Raises OSError, BadHeader."""
        self._catalogue = EngineCatalogue(config)
        self._checked = CheckedAdapters.of(config)

    async def folder(self, name: str, tenant: str) -> str:
        """The checked copy, or an empty text where this tenant may see none of that name. Raises
        AdapterInvalid, AdapterAmbiguous, AdaptersAway, AdapterNotCopied."""
        entry = await self._catalogue.find(name, tenant)
        return str((await self._checked.take(entry)).path) if entry else ""

    async def published(self, names: list[str], tenant: str) -> dict[str, str]:
        """The folders of the adapters this tenant may see, by full name; empty: it has no copy
        yet."""
        entries = await self._catalogue.entries(names, tenant)
        checked = await self._checked.peek(entries)
        folders = dict.fromkeys((entry.full_name for entry in entries), "")
        return folders | {name: str(one.path) for name, one in checked.items()}


class LoadedAdapters:
    """The adapters in one denoiser. In the worker thread."""

    def __init__(self, denoiser: Any, slots: int) -> None:
        self._denoiser, self._slots = denoiser, slots
        self._loaded: OrderedDict[str, str] = OrderedDict()  # folder to PEFT's name; last used last

    @property
    def folders(self) -> frozenset[str]:
        """The folders of the adapters in slots."""
        return frozenset(self._loaded)

    def use(self, folder: str) -> None:
        """Sets the adapter of the pipeline's next calls; empty: the base alone, as if none were
        loaded."""
        if not folder:
            if self._loaded:
                self._denoiser.disable_lora()
            return
        if folder not in self._loaded:
            self._load(Path(folder))
        self._loaded.move_to_end(folder)
        self._denoiser.set_adapters(self._loaded[folder])
        self._denoiser.enable_lora()

    def forget(self, tenant: str) -> None:
        """Drops a removed tenant's own."""
        own = [f for f in self._loaded if Path(f).parent.name == home_of(Path(), tenant).name]
        for folder in own:
            self._denoiser.delete_adapters(self._loaded.pop(folder))

    def _load(self, folder: Path) -> None:
        while len(self._loaded) >= self._slots:
            _, oldest = self._loaded.popitem(last=False)
            self._denoiser.delete_adapters(oldest)
        config = json.loads((folder / CONFIG).read_text())
        state = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in load_file(folder / WEIGHTS).items()
        }
        metadata = {key: config[key] for key in _SCALE if config.get(key)}
        metadata["target_modules"] = sorted({name.rpartition(".lora_")[0] for name in state})
        # Of the whole path: two owners' folders of equal files have one name, their digest.
        name = f"lora_{hashlib.sha256(str(folder).encode()).hexdigest()[:32]}"
        self._denoiser.load_lora_adapter(
            state, prefix=None, adapter_name=name, metadata=metadata, low_cpu_mem_usage=True
        )
        self._loaded[str(folder)] = name
