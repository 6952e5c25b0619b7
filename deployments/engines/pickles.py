"""Weights are safetensors. To read a pickle is to run what its maker wrote into it (L2)."""

import re
from pathlib import Path

from deployments.engines.protocol import EngineLoadFailed

# As libraries name weights. Other files end in `.bin` too, such as OpenVINO's.
_PICKLED = re.compile(r"(.*pytorch_model|model|consolidated).*\.bin|.*\.(pt|pth|ckpt|pkl)")


def refuse(folder: Path) -> None:
    """Raises EngineLoadFailed where a folder that the library reads has weights in a pickle and
    none in safetensors. Where there is no folder, as for a hub's id, the library is told to take
    none."""
    if any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.glob("*")):
        if _PICKLED.fullmatch(path.name):
            advice = "save it as safetensors (`save_pretrained` does)"
            raise EngineLoadFailed(
                "BadModel", f"{path} is a pickle, which is not read; {advice}", False
            )
