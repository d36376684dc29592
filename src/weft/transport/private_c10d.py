"""PyTorch's private names for process groups: all that weft uses of them.

The others: ``weft.torch.pytorch.private``.

A private name may be gone, or mean something else, in the next release. So each one is looked up here, once, with what
it is for and what weft does where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

NEEDED = "weft refuses this PyTorch"


class Name(NamedTuple):
    """A private name. ``purpose``: what weft does with it; ``without``: what happens where it is missing."""

    purpose: str
    without: str
    present: bool


class Names(dict[str, Name]):
    """Private names, by the path under which they are looked up; each path begins with one of ``roots``."""

    def __init__(self, **roots: Any) -> None:
        super().__init__()
        self._roots = SimpleNamespace(**roots)

    def find(self, path: str, purpose: str, without: str = NEEDED) -> Any:
        """The object at the path; None, and a row that says so, if there is none."""
        try:
            found = attrgetter(path)(self._roots)
        except AttributeError:
            self[path] = Name(purpose, without, False)
            return None
        self[path] = Name(purpose, without, True)
        return found

    def find_one(self, paths: Sequence[str], purpose: str, without: str = NEEDED) -> str | None:
        """The first of the paths that leads to something: names by which versions of PyTorch call the same thing."""
        for path in paths:
            if self.find(path, purpose, without) is not None:
                return path
            del self[path]
        self.find(paths[0], purpose, without)
        return None


def missing(tables: Mapping[str, Name]) -> tuple[list[str], list[str]]:
    """Lines on names that this PyTorch lacks: those that weft needs, and those that it does without."""
    needed, spared = [], []
    for path, name in tables.items():
        if not name.present and name.without is NEEDED:
            needed.append(f"{path} ({name.purpose})")
        elif not name.present:
            spared.append(f"{path} ({name.purpose}): {name.without}")
    return needed, spared


NAMES = Names(
    torch=torch, rendezvous=import_module("torch.distributed.rendezvous")
)  # a function has its name, too
_group, _backend = "torch.distributed.ProcessGroup", "torch.distributed.ProcessGroupGloo"
NAMES.find(f"{_group}._register_backend", "groups of some ranks")
NAMES.find(f"{_group}._set_default_backend", "groups of some ranks")
_counts_itself = torch.__version__ >= "2.15"  # not by letters: PyTorch compares versions
if not _counts_itself:
    NAMES.find(f"{_backend}._set_sequence_number_for_group", "the backend weft of torch.distributed")
_get_default_store = NAMES.find(
    "torch.distributed.distributed_c10d._get_default_store", "groups of some ranks"
)
_work_of = NAMES.find(
    "torch._C._distributed_c10d._create_work_from_future", "the backend weft of torch.distributed",
    "its sums are gloo's",
)  # fmt: skip
_handlers = NAMES.find(
    "rendezvous._rendezvous_handlers", "init_process_group without MASTER_ADDR",
    'scripts say init_process_group(init_method="weft://")',
)  # fmt: skip
_broadcast_coalesced = NAMES.find(
    "torch.distributed._broadcast_coalesced", "parameters from one replica to the others",
    "each parameter is a broadcast of its own",
)  # fmt: skip


def default_store() -> Any:
    """The store by which the default group was made."""
    return _get_default_store()


def use_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
    """Let ``group`` send the device's tensors through ``backend``."""
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)


def number_operations(backend: Any) -> None:
    """Let the backend count its operations, as ``init_process_group`` does for PyTorch's own.

    From 2.15 on PyTorch counts by itself, and warns of who asks for it.
    """
    if not _counts_itself:
        backend._set_sequence_number_for_group()


def nccl_options(timeout: timedelta) -> Any:
    """Options of a backend for NCCL, whose operations fail after ``timeout``."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


gives_works = _work_of is not None
"""Whether :func:`work_of` can be called."""


def work_of(future: torch.futures.Future[Any]) -> dist.Work:
    """A work that is done when the future is."""
    work: dist.Work = _work_of(future)
    return work


def rendezvous_handlers() -> dict[str, Any]:
    """PyTorch's table of init methods, to be changed; one of no effect where it cannot be reached."""
    return {"env": None} if _handlers is None else _handlers


def broadcast_all(group: Any, tensors: list[torch.Tensor], bucket_bytes: int, source: int) -> None:
    """The tensors of rank ``source`` of the group, on every rank of it."""
    if _broadcast_coalesced is not None:
        _broadcast_coalesced(group, tensors, bucket_bytes, source)
        return
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
