"""Weights with one row for each word of a vocabulary: embeddings, and the linear that gives a score for each word.

Each rank has some of the rows. An embedding gives zeros for words of other ranks, and the ranks' results are
all-reduced: one number and zeros, so the sum is exact. The logits of all ranks are all-gathered, so whatever comes
after them gets the full tensor. An embedding and a linear that share their weight share the shard, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.torch.pytorch.torch_functions import METADATA
from weft.torch.tensors.cut_weights import SHAPES, Part, own
from weft.torch.tensors.pytree import tensors_in
from weft.torch.tensors.shards import ShardPositions

from .cuts import Cut, part_sizes
from .shard_group import ShardGroup, leave
from .sharded_activations import (
    AllGathered,
    can_scatter,
    enters,
    may_stay_sharded,
    narrowed,
    scattered,
    sharded_activation,
)

SHARE = 1 / 50
"""Of the model's parameters: a weight with less is not worth the messages."""


def rows(module: nn.Module) -> int:
    """The number of words in the module's vocabulary."""
    return int(module.get_parameter("weight").shape[0])


def why_whole(module: nn.Module, size: int) -> str:
    """Why the rows of an embedding, or of a linear to a vocabulary, cannot be split; empty if they can."""
    if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
        return f"its weight is that of a {type(module).__name__}, too"
    if rows(module) < size:
        return f"its {rows(module)} rows are fewer than the {size} ranks"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "max_norm writes into rows as they are looked up"
        if module.sparse or module.scale_grad_by_freq:
            return "its gradient is sparse" if module.sparse else "scale_grad_by_freq counts the words"
    return ""


def cuts_of_vocabulary(module: nn.Module) -> dict[str, Cut]:
    """The cuts of its parameters: by rows; a bias stays whole, models share it among modules."""
    shape = tuple(module.get_parameter("weight").shape)
    return {"weight": Cut(0, shape[:1], shape)}


def looked_up(
    module: nn.Embedding, words: Tensor, shard_group: ShardGroup, stays_sharded: bool = False
) -> Tensor:
    """The rows of all words, of which each rank has some; ``in_parts``: each rank those of some tokens."""
    weight = own(module, "weight")
    sizes = part_sizes(module.num_embeddings, shard_group.size)
    first, count = sum(sizes[: shard_group.rank]), sizes[shard_group.rank]
    elsewhere = (words < first) | (words >= first + count)
    unknown = (words < 0) | (words >= module.num_embeddings)
    local = (
        (words - first).masked_fill(elsewhere, 0).masked_fill(unknown, count)
    )  # PyTorch's own error on all ranks
    padding = module.padding_idx
    padding = None if padding is None or not first <= padding < first + count else padding - first
    found = F.embedding(local, weight, padding)
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return (
        scattered(found, shard_group)
        if stays_sharded and can_scatter(found, shard_group)
        else leave(found, shard_group)
    )


def scores(module: Any, shard_group: ShardGroup, stays_sharded: bool, input: Tensor) -> Tensor:
    """The scores of all words; ``stays_sharded``: sharded, until somebody needs the whole."""
    found = F.linear(enters(input, shard_group), own(module, "weight"))
    positions = ShardPositions.contiguous(part_sizes(module.out_features, shard_group.size))
    if module.bias is not None:
        bias = narrowed(module.bias, 0, positions, shard_group)
        found = found + bias.to(found.dtype)
    if stays_sharded and may_stay_sharded():
        return sharded_activation(found, shard_group, -1, positions)
    result: Tensor = AllGathered.apply(found, shard_group, found.ndim - 1, positions)
    return result


class LookedUp(TorchFunctionMode):
    """Inside, rows of a module's weight are looked up on all ranks: for embeddings that do more with what they find."""

    def __init__(self, module: nn.Embedding, shard_group: ShardGroup, stays_sharded: bool = False) -> None:
        super().__init__()
        self.module, self.shard_group, self.stays_sharded = module, shard_group, stays_sharded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            words, weight = given_to_embedding(*args, **(kwargs or {}))
            if (weight.of if isinstance(weight, Part) else weight) is own(self.module, "weight"):
                return looked_up(self.module, words, self.shard_group, self.stays_sharded)
        return func(*args, **(kwargs or {}))


def given_to_embedding(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """The two arguments of ``F.embedding`` that matter; those of the module are known."""
    return input, weight


class Reads(TorchFunctionMode):
    """Counts, by id, the functions that take a weight: for each as many embeddings, linears, and others."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.counts = {each: [0, 0, 0] for each in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA or func in SHAPES:
            for each in tensors_in((args, kwargs or {})):
                if id(each) in self.counts:
                    at = 0 if func is F.embedding else 1 if func is F.linear else 2
                    self.counts[id(each)][at] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _counted() -> Iterator[dict[int, int]]:
    """Inside, calls of modules are counted by their ids."""
    counts: dict[int, int] = {}

    def count(module: nn.Module, args: Any) -> None:
        counts[id(module)] = counts.get(id(module), 0) + 1

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def find_vocabulary(
    model: nn.Module, run: Callable[[], Any], size: int, owners: Mapping[int, list[str]], stay: Mapping[str, str],
    why: Callable[[str], str], wanted: Collection[str] = (),
) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """The embeddings, and linears to a vocabulary, whose rows can be split; and the others of some size, and why.

    Args:
        model: The model, whole.
        run: Runs it once.
        size: How many ranks axis ``tp`` has.
        owners: For each parameter, by its id, the modules that have it.
        stay: The linears that are not split in pairs.
        why: Says for a module why the script's own wishes or changes keep it whole; empty if nothing does.
        wanted: Those that the script wants to be split, of whatever size.
    """
    modules = dict(model.named_modules())
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    least = SHARE * sum(parameter.numel() for parameter in model.parameters())
    vocabularies = {module.num_embeddings for module in embeddings.values()}
    groups: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        linear = type(module) is nn.Linear and name in stay and module.out_features in vocabularies
        large = weight is not None and weight.numel() >= least and (linear or name in embeddings)
        if weight is not None and (large or name in wanted):
            groups[id(weight)] = owners[id(weight)]
    if not groups and not wanted:
        return [], {}
    with torch.no_grad(), _counted() as calls, Reads(set(groups)) as reads:
        run()
    found: list[str] = []
    made = "its weight is made from others (parametrizations)"
    whole = {name: made for name in wanted if not any(name in names for names in groups.values())}
    for weight_id, names in groups.items():
        reasons = [why_whole(modules[name], size) or why(name) for name in names]
        reason = next(filter(None, reasons), "")
        called = [0, 0, 0]
        for name in names:
            called[name not in embeddings] += calls.get(id(modules[name]), 0)
        if not reason and not any(called):
            reason = "the run did not call it"
        elif not reason and reads.counts[weight_id] != called:
            reason = "the model reads its weight by itself"
        if reason:
            whole.update({name: reason for name in names if name in embeddings or name in wanted})
        else:
            found += names
    return found, whole
