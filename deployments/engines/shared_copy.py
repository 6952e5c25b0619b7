"""A copy of a model's files in host RAM that the node agent hands to its engines (D4, L4).

The files are sealed memory files, so what an engine maps does not change. Libraries that read files
are given a folder in which the copied files are links to this process's descriptors, and all other
files links to those on disk. A module that sleeps writes nothing where the copy has its bytes, and
wakes from there.
"""

import json
import logging
import mmap
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.engines.lent import receive
from deployments.engines.protocol import Config

logger = logging.getLogger("arbiter.engine")

_PREFIX_BYTES = 64  # of a tensor, by which it is looked for


@dataclass(frozen=True, slots=True)
class Piece:
    """Where bytes lie in the copy."""

    fd: int
    start: int
    size: int


@dataclass(slots=True, eq=False)
class SharedCopy:
    """The files by their names in the model's folder. `own_bytes_most`: what a sleeping model may
    hold beside the copy."""

    key: str
    files: Mapping[str, int]
    own_bytes_most: int
    _pieces: dict[tuple[int, bytes], list[Piece]] | None = field(default=None, repr=False)

    @property
    def tensor_fds(self) -> list[int]:
        """Returns the descriptors of the files in which `candidates` looks."""
        return [fd for name, fd in self.files.items() if name.endswith(".safetensors")]

    def candidates(self, size: int, prefix: bytes) -> list[Piece]:
        """Tensors of the copy with that size and beginning. Which bytes follow is for the caller to
        compare."""
        if self._pieces is None:
            self._pieces = defaultdict(list)
            for piece in (piece for fd in self.tensor_fds for piece in _tensors(fd)):
                head = os.pread(piece.fd, min(piece.size, _PREFIX_BYTES), piece.start)
                self._pieces[piece.size, head].append(piece)
        return self._pieces.get((size, prefix[:_PREFIX_BYTES]), [])


def _tensors(fd: int) -> Iterator[Piece]:
    """Finds the tensors by the header of a safetensors file: eight bytes of its length, then
    JSON."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    header: dict[str, Any] = json.loads(os.pread(fd, length, 8))
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            if end > start:
                yield Piece(fd, 8 + length + start, end - start)


@contextmanager
def mapped(fd: int) -> Iterator[Any]:
    """The whole file as a tensor of bytes, valid only within the context, and never to be
    written."""
    import torch

    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():  # torch has no tensors that only read
        warnings.simplefilter("ignore", UserWarning)
        view = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        yield view
    finally:
        del view  # the mapping goes with its last reference


# -- at the start of an engine ---------------------------------------------------------------------


def received(config: Config) -> Config:
    """What the engine is built with: where a copy was lent, its `model` is a folder of links into
    it, and `shared_copy` is the SharedCopy. A copy that cannot be had costs nothing but the reading
    of the files."""
    lent = config.get("copy")
    if lent is None:
        return config
    try:
        fds = receive(lent["socket"], lent["ticket"], lent["key"])
    except OSError as error:
        logger.warning("reads its files, because it was handed no copy of them: %s", error)
        return config
    index = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
    files = dict(zip(index["names"], fds[1:], strict=True))
    copy = SharedCopy(index["key"], files, config["host_copy"]["own_bytes"])
    view = linked(Path(config["model"]), Path(tempfile.mkdtemp()) / "model", files)
    return config | {"model": str(view), "shared_copy": copy}


def linked(model: Path, folder: Path, files: Mapping[str, int]) -> Path:
    """Makes `folder` look like the model's, with links to our descriptors in the place of `files`.
    Returns the folder; of a model that is one file, the link to it, with links to the files beside
    it. Raises OSError."""
    folder.mkdir(mode=0o700)
    own = Path(f"/proc/{os.getpid()}/fd")  # not `self`: a library may start a process that reads
    if model.is_file():
        (folder / model.name).symlink_to(own / str(files[model.name]))
        for path in (p for p in model.parent.iterdir() if p.is_file() and p != model):
            (folder / path.name).symlink_to(path.absolute())
        return folder / model.name
    for parent, folders, names in os.walk(model, followlinks=True):
        inside = Path(parent).relative_to(model)
        for name in folders:
            (folder / inside / name).mkdir(mode=0o700)
        for name in names:
            fd = files.get(str(inside / name))
            target = Path(parent) / name if fd is None else own / str(fd)
            (folder / inside / name).symlink_to(target.absolute() if fd is None else target)
    return folder
