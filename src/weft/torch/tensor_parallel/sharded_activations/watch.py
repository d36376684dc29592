"""Modules that may leave their results sharded, found by running the model once more, whole.

The results of these modules are sharded over one rank, so each shard is the whole.
What functions do with them is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.tensors.pytree import map_arguments, map_tensors
from weft.torch.tensors.shards import ShardPositions

from .losses import LOSS
from .rules import PARTS
from .tensor import ShardedActivation, sharded_activation

SCORES, TOKENS = "scores", "tokens"


class Alone:
    """Stands for the ranks: one, which has all; see :class:`weft.torch.tensor_parallel.shard_group.ShardGroup`."""

    rank, size, seat = 0, 1, 0
    remedy = ""

    def __init__(self, device: torch.device, wanted: int) -> None:
        self.wanted = wanted
        self.mesh = SimpleNamespace(device_type=device.type)
        self.notes: dict[str, dict[str, list[str]]] = {}

    def uses(self, full: Tensor) -> Tensor:
        return full

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor, along: int, positions: ShardPositions) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return tensor

    def full_tensor(self, shard: Tensor, dim: int, positions: ShardPositions) -> Tensor:
        return shard

    def agree(self, what: str) -> None:
        """There is one rank."""

    def noted(self, names: frozenset[str], what: str, how: str) -> None:
        for name in names:
            self.notes.setdefault(name, {}).setdefault(how, []).append(what)


class _Leaves:
    """Stands for a module's ``forward``: its result stays sharded."""

    def __init__(self, module: nn.Module, name: str, kind: str, shard_group: Alone) -> None:
        self.module, self.name, self.kind, self.shard_group = module, name, kind, shard_group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = type(self.module).forward(self.module, *args, **kwargs)
        if not isinstance(result, Tensor) or result.ndim < 2:
            return result
        along = result.ndim - (1 if self.kind == SCORES else 2)
        if self.kind == TOKENS and result.shape[along] % self.shard_group.wanted:
            self.shard_group.noted(frozenset([self.name]), f"{result.shape[along]} tokens", "uneven")
        return sharded_activation(
            result,
            self.shard_group,
            along,
            ShardPositions.contiguous([result.shape[along]]),
            frozenset([self.name]),
        )


class _Computes:
    """Stands for the ``forward`` of a module that computes on parts of sequences: it takes parts, and leaves some."""

    def __init__(self, name: str, dim: int, shard_group: Alone, then: Callable[..., Any]) -> None:
        self.names, self.dim, self.shard_group, self.then = frozenset([name]), dim, shard_group, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_arguments((args, kwargs), self._taken)
        return map_tensors(self.then(*args, **kwargs), self._left)

    def _taken(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedActivation):
            return tensor
        self.shard_group.noted(tensor.names, "", PARTS)
        return tensor.shard

    def _left(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedActivation) or tensor.ndim < 3 or not tensor.is_floating_point():
            return tensor
        positions = ShardPositions.contiguous([tensor.shape[self.dim]])
        return sharded_activation(tensor, self.shard_group, self.dim, positions, self.names)


class _Takes:
    """Stands for the ``forward`` of a linear that gathers what it gets itself."""

    def __init__(self, module: nn.Module, then: Callable[..., Any]) -> None:
        self.module, self.then = module, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_arguments(
            (args, kwargs), lambda each: each.shard if isinstance(each, ShardedActivation) else each
        )
        return self.then(*args, **kwargs)


def watch(
    model: nn.Module,
    run: Callable[[], Any],
    size: int,
    kinds: Mapping[str, str | int],
    gathering: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The modules that may leave their results sharded, and what becomes of the others' or of their wholes.

    Args:
        model: The model, whole.
        run: Runs it once, with the loss if there is one.
        size: How many ranks there will be.
        kinds: The modules to be tried, by name: ``scores`` for linears to a vocabulary, ``tokens`` for others, the
            dimension of positions for modules that compute on parts of sequences.
        gathering: The linears that gather sharded tokens by themselves, by name.

    Returns:
        Their names, and for some of the modules a text for the table.
    """
    kinds, texts = dict(kinds), dict[str, str]()
    while kinds:
        shard_group = Alone(next(model.parameters()).device, size)
        try:
            with torch.enable_grad(), _attached(model, kinds, gathering, shard_group):
                run()
        except Exception as error:
            if not any("writes" in notes for notes in shard_group.notes.values()):
                return [], texts | dict.fromkeys(
                    kinds, f"all-gathered: on shards the model fails, {error!r}"[:200]
                )
        written = {name: notes["writes"][0] for name, notes in shard_group.notes.items() if "writes" in notes}
        for name, what in written.items():
            texts[name] = f"all-gathered: {what} writes into it"
            del kinds[name]
        if not written:
            break
    found = []
    for name, kind in kinds.items():
        notes = shard_group.notes.get(name, {})
        full = ", ".join(dict.fromkeys(notes.get("whole", ())))
        if kind == SCORES and LOSS not in notes:
            texts[name] = "logits all-gathered" + f" for {full}" * bool(full)
            continue
        if type(kind) is int and PARTS not in notes:
            texts[name] = "all-gathered" + f" for {full}" * bool(full)
            continue
        found.append(name)
        texts[name] = {SCORES: "loss on the shards", TOKENS: "reduce-scattered along tokens"}.get(
            str(kind), "kept sharded"
        )
        if "uneven" in notes:
            texts[name] += f", whole where {size} ranks cannot divide them ({notes['uneven'][0]})"
        texts[name] += f", all-gathered for {full}" * bool(full)
    return found, texts


@contextmanager
def _attached(
    model: nn.Module, kinds: Mapping[str, str | int], gathering: Sequence[str], shard_group: Alone
) -> Iterator[None]:
    """Inside, the modules' results stay sharded."""
    modules = [model.get_submodule(name) for name in {*kinds, *gathering}]
    before = [module.__dict__.get("forward") for module in modules]
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        then = module.__dict__.get("forward") or MethodType(type(module).forward, module)
        module.__dict__["forward"] = (
            _Leaves(module, name, kind, shard_group)
            if isinstance(kind, str)
            else _Computes(name, kind, shard_group, then)
        )
    for name in gathering:
        module = model.get_submodule(name)
        then = module.__dict__.get("forward") or MethodType(type(module).forward, module)
        module.__dict__["forward"] = _Takes(module, then)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
