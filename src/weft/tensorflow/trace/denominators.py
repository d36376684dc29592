"""By what the losses of a step divide: their microbatches have to be summed in the same way.

Keras divides a loss by the number of its samples, or by that of the positions that a mask leaves, or by the sum of its
weights, or by nothing. With S_i the sum of microbatch i and D_i what it is divided by, one process has

    sum of S_i / sum of D_i = sum of w_i S_i / D_i,    w_i = D_i / sum of D_j

and the same weights make the gradient of the one from those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow import private

SAMPLES, NOTHING, WEIGHTS = "their samples", "nothing", "weights, masks or labels that count"


class SeveralDenominators(UsageError):
    """A number is made of losses that divide by different things."""


@dataclass(frozen=True)
class Reduction:
    """One loss: its value, what it is divided by, and the tensor with that if it is no number of samples."""

    loss: Any
    kind: str
    denominator: Any = None


@dataclass
class Reductions:
    """The losses of a microbatch, as they are computed, and the gradients that are taken of them."""

    noted: list[Reduction] = field(default_factory=list)
    targets: dict[Any, list[Any]] = field(default_factory=dict)
    _known: dict[Any, frozenset[int]] = field(default_factory=dict)

    @property
    def denominators(self) -> list[Any]:
        """Those that are tensors."""
        return [each.denominator for each in self.noted if each.denominator is not None]

    def of(self, leaf: Any) -> Reduction | None:
        """The weights by which microbatches of a tensor are summed; None for the mean over their samples.

        Raises:
            SeveralDenominators: Different weights would be right for its parts.
        """
        if not private.is_of_graph(leaf) or all(each.kind == SAMPLES for each in self.noted):
            return None
        found = [self.noted[number] for number in self._losses(leaf)]
        kinds = sorted({each.kind for each in found})
        if len(kinds) > 1 or sum(each.kind == WEIGHTS for each in found) > 1:
            raise SeveralDenominators(
                f"a number that a step returns comes from losses that Keras divides by different things "
                f"({', '.join(kinds)}), so microbatches cannot be summed to what the whole batch gives: return the "
                'gradients of each loss by themselves, or write "microbatches": 1'
            )
        return found[0] if found and found[0].kind != SAMPLES else None

    def _losses(self, leaf: Any) -> frozenset[int]:
        """The losses that a tensor is computed from; of a gradient those of what it is taken of."""
        if _key(leaf) in self._known:
            return self._known[_key(leaf)]
        losses = {_key(each.loss): number for number, each in enumerate(self.noted)}
        found: set[int] = set()
        seen: set[Any] = set()
        todo = [leaf]
        while todo:
            tensor = todo.pop()
            key = _key(tensor)
            if key in seen or not private.is_of_graph(tensor):
                continue
            seen.add(key)
            if key in losses:
                found.add(losses[key])
            for target in self.targets.get(key, ()):
                found |= self._losses(target)
            if key not in self.targets:
                todo += tensor.op.inputs
        self._known[_key(leaf)] = frozenset(found)
        return self._known[_key(leaf)]


def _key(tensor: Any) -> Any:
    tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return tensor.ref() if tf.is_tensor(tensor) else id(tensor)


@contextmanager
def watch_losses() -> Iterator[Reductions]:
    """Inside, the losses of Keras are noted, and gradients of anything."""
    found = Reductions()

    def asked(targets: Sequence[Any], sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        found.targets.update({_key(each): list(targets) for each in gradients if each is not None})

    def reduced(loss: Any, reduction: str | None, weights: Any, mask: Any, scalar: bool) -> None:
        kind, denominator = SAMPLES, None
        if scalar or reduction in (None, "none"):
            pass
        elif reduction == "sum":
            kind = NOTHING
        elif reduction == "mean_with_sample_weight" and weights is not None:
            kind, denominator = WEIGHTS, tf.reduce_sum(weights)
        elif mask is not None:
            kind, denominator = WEIGHTS, tf.reduce_sum(tf.cast(mask, loss.dtype))
        found.noted.append(Reduction(loss, kind, denominator))

    with private.watch_reductions(reduced), private.watch_asked(asked):
        yield found


def count_of(denominators: Sequence[Any], shares: Sequence[Any]) -> Any:
    """The number by which a loss of the whole mini-batch is divided."""
    return tf.add_n(_counted(denominators, shares))


def _counted(denominators: Sequence[Any], shares: Sequence[Any]) -> list[Any]:
    """The denominators of microbatches; 0 for one without samples."""
    return [each * tf.cast(share > 0, each.dtype) for each, share in zip(denominators, shares, strict=True)]


def weights_of(reduction: Reduction | None, denominators: Sequence[Any], shares: Sequence[Any]) -> list[Any]:
    """The weight of each microbatch, from ``denominators`` and ``shares`` of the samples, 0 for one without."""
    if reduction is None:
        return list(shares)
    if reduction.kind == NOTHING:
        return [tf.cast(each > 0, each.dtype) if tf.is_tensor(each) else 1.0 for each in shares]
    counted = _counted(denominators, shares)
    total = tf.add_n(counted)
    return [tf.math.divide_no_nan(each, total) for each in counted]
