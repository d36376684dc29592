"""The result of a step: for every tensor one entry a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.session.cut import Group
from weft.session.not_a_tensor import NotATensor, NoTensorError
from weft.torch.tensors.mini_batch import padded
from weft.torch.tensors.pytree import CONTAINERS, items_of, rebuilt


class StepOutput(NotATensor):
    """One tensor of a step's result, for each microbatch: ``outputs[i]`` is microbatch i's.

    ``weights`` are the microbatches' shares of the samples (equal unless the step allows uneven ones). ``groups``: the
    rows of the mini-batch that each microbatch has, if it was cut by tokens.
    """

    REMEDY = "take .reduce_mean(), the batch's mean, or .concat(), the samples in order"

    def __init__(
        self, outputs: Sequence[Tensor], weights: Sequence[float] | None = None, groups: Sequence[Group] = ()
    ) -> None:
        self.outputs = list(outputs)
        self.groups = groups
        self.weights = list(weights) if weights is not None else [1.0 / len(self.outputs)] * len(self.outputs)

    def reduce_mean(self) -> Tensor:
        """The mean over microbatches, each with its share of the samples; shape of one entry.

        A microbatch whose share is 0 takes no part, whatever it has: the mean over no label at all is NaN.
        """
        if len(set(self.weights)) == 1:
            return (
                self.stack().mean(0) if self.outputs[0].is_floating_point() else self.stack().float().mean(0)
            )
        return sum(w * t for w, t in zip(self.weights, self.outputs, strict=True) if w)  # type: ignore[return-value]

    def reduce_sum(self) -> Tensor:
        """The sum over microbatches; shape of one entry."""
        return self.stack().sum(0)

    def concat(self) -> Tensor:
        """All entries after one another along dim 0: the mini-batch's order.

        With ``groups``, entries that have a row for each of the mini-batch are put in its order, with zeros where
        padding was cut off along dim 1.
        """
        if self.groups and all(
            entry.dim() and len(entry) == len(group.rows)
            for entry, group in zip(self.outputs, self.groups, strict=True)
        ):
            order = torch.tensor([row for group in self.groups for row in group.rows]).argsort()
            return torch.cat(padded(self.outputs, self.groups))[order.to(self.outputs[0].device)]
        return torch.cat([entry.reshape(1) if entry.dim() == 0 else entry for entry in self.outputs])

    def stack(self) -> Tensor:
        """Shape (microbatches, *entry)."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without graphs."""
        return StepOutput([entry.detach() for entry in self.outputs], self.weights, self.groups)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs})"

    def __getattr__(self, name: str) -> NoReturn:
        if name == "backward":
            raise NoTensorError(
                "the backward pass belongs inside of the step: call model.backward(loss) in the function that "
                "@weft.step decorates, not on what the step returns"
            )
        if hasattr(Tensor, name) and not name.startswith("__"):
            self.refuse(f".{name}")
        raise AttributeError(f"a StepOutput has no {name}")


def collect(results: Sequence[Any], weights: Sequence[float], groups: Sequence[Group] = ()) -> Any:
    """The microbatches' results as one structure: tensors become :class:`StepOutput`, other leaves lists."""
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        return StepOutput(results, weights, groups)
    kind = type(first)
    if first is None and all(result is None for result in results):
        return None
    if any(type(result) is not kind for result in results) or kind is torch.Size:
        return list(results)
    if not isinstance(first, CONTAINERS):
        return list(results)
    held: list[Any] = [items_of(result) for result in results]
    if any(items.keys() != held[0].keys() for items in held):
        return list(results)
    return rebuilt(first, [collect([items[key] for items in held], weights, groups) for key in held[0]])
