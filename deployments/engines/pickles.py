"""Weights are safetensors. To read a pickle is to run what its maker wrote into it (L2)."""

import re
from pathlib import Path

from deployments.engines.protocol import LoadFailed

# As libraries name weights. Other files end in `.bin` too, such as OpenVINO's.
_PICKLED = re.compile(r"(.*pytorch_model|model|consolidated).*\.bin|.*\.(pt|pth|ckpt|pkl)")


def refuse(model: str) -> None:
    """Raises LoadFailed where a folder of the model has weights in a pickle and none in
    safetensors. A hub's id is no folder; for those the library is told to take no pickle."""
    for path in sorted(Path(model).rglob("*")):
        if _PICKLED.fullmatch(path.name) and not any(path.parent.glob("*.safetensors")):
            advice = "save it as safetensors (`save_pretrained` does)"
            raise LoadFailed("BadModel", f"{path} is a pickle, which is not read; {advice}", False)
