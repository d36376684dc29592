"""The tokens of a padded mini-batch: where they are in its rows, and which dims of its tensors are their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.session.cut import Group, Tokens
from weft.session.lengths import group_by_length

Named = Sequence[tuple[str, Tensor]]


def group_rows(
    tokens: Tokens, tensors: Named, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> tuple[Group, ...]:
    """The rows of ``count`` microbatches. ``tensors``: those among the arguments that are cut, with their paths.

    Raises:
        UsageError: There is no mask of the rows.
    """
    mask = mask_of(tokens, tensors, args, kwargs)
    (front, back), length = tokens.sides, mask.shape[1]
    spans = [
        (first if front else 0, last if back else length) if first < last else (0, 0)
        for first, last in spans_of(mask)
    ]
    return tuple(group_by_length(spans, length, count))


def mask_of(tokens: Tokens, tensors: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The mask of a mini-batch, of the shape (rows, positions)."""
    if callable(tokens.mask):
        with torch.no_grad():
            mask = tokens.mask(*args, **kwargs)
        name = "the function tokens"
    else:
        name = tokens.mask
        ends = name, f"[{name!r}]", f".{name}"
        found = [tensor for path, tensor in tensors if path == name or path.endswith(ends[1:])]
        if len(found) != 1:
            listed = ", ".join(path for path, _ in tensors) or "none"
            raise UsageError(
                f'tokens="{name}" names {"several" if found else "none"} of the tensors among the step\'s arguments '
                f"({listed}): name the one that is not 0 where a row has a token, or give a function of the arguments "
                "that returns such a mask: @weft.step(tokens=lambda model, ids: ids != 0)"
            )
        mask = found[0]
    rows = len(tensors[0][1])
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != rows or not mask.shape[1]:
        shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(
            f"{name} is {shown}, but tokens is a mask of the shape [{rows}, positions] that is not 0 where a row has a "
            "token"
        )
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise UsageError(
            f"{name} has negative numbers: tokens is a mask that is not 0 where a row has a token, not one that is "
            "added to scores"
        )
    return mask


def spans_of(mask: Tensor) -> list[tuple[int, int]]:
    """First and one past the last token of each row; the same for a row without tokens."""
    full = (mask != 0).to(torch.int64)
    first, last = full.argmax(1), mask.shape[1] - full.flip(1).argmax(1)
    has = full.any(1)
    found: list[list[int]] = torch.stack([first * has, last * has], 1).tolist()
    return [(start, stop) for start, stop in found]


def trimmed_dims(tokens: Tokens, tensors: Named, length: int) -> dict[str, Sequence[int]]:
    """The dims of each tensor that are positions of tokens, by its path.

    Raises:
        UsageError: They are others than when the cut was compared with the whole batch.
    """
    found: dict[str, Sequence[int]] = {
        path: [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == length]
        for path, tensor in tensors
    }
    if tokens.trimmed is None:
        return found
    for path, tensor in tensors:
        dims = tokens.trimmed.get(path)
        if dims is None:
            raise UsageError(
                f"{path} was not among the step's arguments when its cut by tokens was compared with the whole batch: "
                "give the first step a tensor there, too"
            )
        if not set(dims) <= set(found[path]):
            raise UsageError(
                f"{path} has the shape {list(tensor.shape)}, but {length} positions along dim {dims[0]} were expected, "
                "as in the mask of tokens and in the first step"
            )
    return {path: tokens.trimmed[path] for path, _ in tensors}
