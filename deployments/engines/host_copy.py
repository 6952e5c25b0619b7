"""Weights of a torch module in host RAM: out to a memfd, and back into the same tensors.

The memfd's name starts with `host-copy`, by which the node agent charges it to the host. `offload`
writes it through a mapping that is gone when it returns, so that the process's own bytes fall. Of a
module on a GPU the mapping stays, and is pinned: pages that the kernel may move are read at an
eighth of the link's speed (H200: 7 of 55 GB/s), and to pin them takes longer than to copy them.
What a copy that the node shares has already (shared_copy.py) is not written: a sleeping module then
holds only what lies in no file, such as buffers.
"""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from deployments.engines.protocol import CannotSleep, Config
from deployments.engines.shared_copy import Piece, SharedCopy, mapped

logger = logging.getLogger("arbiter.engine")

_ALIGN = 64  # bytes; a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True)
class View:
    """One parameter or buffer, and which part of its storage it shows."""

    tensor: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Place:
    """Where one storage lies in the copy, and the tensors that share it."""

    start: int
    size: int
    device: torch.device
    views: list[View]
    shared: Piece | None = None  # where the node's copy has its bytes; they are then not written


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A module's emptied storages and the memfd with what was in them."""

    fd: int
    total: int
    places: tuple[Place, ...]
    pinned: mmap.mmap | None = None  # the mapping of the memfd that a GPU reads


def own(module: torch.nn.Module) -> None:
    """Copies weights that are still views of their file: a rewritten file must not change a loaded
    model."""
    for tensor in _tensors(module):
        tensor.data = tensor.data.clone()


def offload(module: torch.nn.Module, name: str, config: Config) -> HostCopy:
    """Copies every parameter and buffer to the host and empties it. Raises OSError, and CannotSleep
    for a model that was to sleep in a shared copy and has none with its bytes."""
    places, total = _lay_out(module)
    if "host_copy" in config:
        places, total = _left(places, config)
    fd = os.memfd_create(f"host-copy-{name}", os.MFD_CLOEXEC)
    os.truncate(fd, max(1, total))
    pinned = _pinned(fd, total) if _gpus(places) and total else None
    with _mapped(fd, total, pinned) as copy:
        for place in (place for place in places if place.shared is None):
            held = _bytes(place.views[0].tensor.untyped_storage())
            target = copy[place.start : place.start + place.size]
            target.copy_(held, non_blocking=pinned is not None)
        _await_gpus(places)
    for view in (view for place in places for view in place.views):
        view.tensor.data = torch.empty(0, dtype=view.tensor.dtype, device=view.tensor.device)
    return HostCopy(fd, total, tuple(places), pinned)


def restore(parked: HostCopy) -> None:
    """Fills the same tensors again, with storages shared as before, and drops the copy."""
    is_pinned = parked.pinned is not None
    copied = _mapped(parked.fd, parked.total, parked.pinned)
    with copied as copy, _all_mapped(parked.places) as shared:
        for place in parked.places:
            filled = torch.empty(place.size, dtype=torch.uint8, device=place.device)
            source = shared[place.shared.fd] if place.shared else copy
            start = place.shared.start if place.shared else place.start
            filled.copy_(source[start : start + place.size], non_blocking=is_pinned)
            for view in place.views:
                empty = torch.empty(0, dtype=view.tensor.dtype, device=place.device)
                storage = filled.untyped_storage()
                view.tensor.data = empty.set_(storage, view.offset, view.shape, view.stride)
        _await_gpus(parked.places)
    if parked.pinned is None:
        os.close(parked.fd)
        return
    # In a thread, because to unpin and free the pages takes longer than the copies took.
    threading.Thread(target=_drop, args=(parked.fd, parked.pinned), name="unpin").start()


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _lay_out(module: torch.nn.Module) -> tuple[list[Place], int]:
    """One place per storage, however many tensors share it."""
    places: dict[int, Place] = {}
    at = 0
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = Place(at, storage.nbytes(), tensor.device, [])
            at += -(-storage.nbytes() // _ALIGN) * _ALIGN
        view = View(tensor, tensor.shape, tensor.stride(), tensor.storage_offset())
        places[storage.data_ptr()].views.append(view)
    return list(places.values()), at


def _left(places: list[Place], config: Config) -> tuple[list[Place], int]:
    """Returns the places, with `shared` where the node's copy has their bytes, and the total size
    of the others. Raises CannotSleep."""
    copy: SharedCopy | None = config.get("shared_copy")
    if copy is None:
        raise CannotSleep("its files are in no host copy, so it would need one of its own")
    extents, total = [], 0
    with ExitStack() as stack:
        maps = {fd: stack.enter_context(mapped(fd)) for fd in copy.tensor_fds}
        for place in places:
            held = _bytes(place.views[0].tensor.untyped_storage()).cpu()
            pieces = copy.candidates(place.size, held[:64].numpy().tobytes())
            same = (p for p in pieces if torch.equal(held, maps[p.fd][p.start : p.start + p.size]))
            piece = next(same, None)
            extents.append(replace(place, start=total, shared=piece))
            total += 0 if piece else -(-place.size // _ALIGN) * _ALIGN
    if total > copy.own_bytes_most:
        raise CannotSleep(
            f"{total} bytes of it are not as in its files, and {copy.own_bytes_most} may be beside"
            " a shared copy; give it `host_copy: private`"
        )
    return extents, total


@contextmanager
def _all_mapped(places: tuple[Place, ...]) -> Iterator[dict[int, torch.Tensor]]:
    with ExitStack() as stack:
        fds = {place.shared.fd for place in places if place.shared}
        yield {fd: stack.enter_context(mapped(fd)) for fd in sorted(fds)}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gpus(places: Iterable[Place]) -> set[torch.device]:
    return {place.device for place in places if place.device.type == "cuda"}


def _await_gpus(places: Iterable[Place]) -> None:
    """Returns once every copy to and from them is done; each GPU has its own order."""
    for gpu in _gpus(places):
        torch.cuda.synchronize(gpu)


def _pinned(fd: int, size: int) -> mmap.mmap | None:
    """Returns a pinned mapping of the memfd, whose pages the kernel does not move. None where the
    driver refuses to pin it: the copies then take the slower way."""
    mapping = mmap.mmap(fd, size)
    code = int(torch.cuda.cudart().cudaHostRegister(_address(mapping), size, 0))
    if code == 0:
        return mapping
    logger.warning("%d bytes are not pinned (CUDA error %d), so a wake takes longer", size, code)
    _forget_error()
    return None


def _forget_error() -> None:
    """Clears CUDA's last error. CUDA keeps it until a call reads it, so that the next kernel of
    this thread would raise it, and torch has no such call. Under ROCm the error stays."""
    if torch.version.cuda is None:
        return
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    try:
        ctypes.CDLL(name).cudaGetLastError()  # the library that torch has loaded
    except OSError as error:
        logger.warning("the next CUDA call may raise that error, because %s", error)


def _drop(fd: int, mapping: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(_address(mapping))
    os.close(fd)


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@contextmanager
def _mapped(fd: int, size: int, pinned: mmap.mmap | None) -> Iterator[torch.Tensor]:
    """Yields the memfd as a tensor of bytes, valid only within the context. `pinned`: the mapping
    to use, in place of a mapping for the context alone."""
    mapping = pinned or mmap.mmap(fd, max(1, size))
    view = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        yield view
    finally:
        del view  # the mapping goes with its last reference
