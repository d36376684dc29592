"""``fp16_states_<rank>.pt`` of older scripts: 32-bit copies of 16-bit weights, and the loss scale.

How such a file is laid out inside was never documented, so what is in it is found by its form:

    {name: tensor}  or  {number: tensor}     copies by the parameter's name, or by its number among the optimizer's
    [[tensor, ...], ...]                     copies by group, of the parameters that this rank's model file has
    "loss_scale", "cur_scale"                the loss scale; also inside of a dict "loss_scaler"

Anything else is refused: without the copies a resumed run would quietly go on from rounded weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from weft.errors import CheckpointError
from weft.torch.tensors.state_names import fitting

_SCALES = ("loss_scale", "cur_scale")


def read_fp16_state(
    content: Any, groups: Sequence[Sequence[str]], held: Set[str], where: str
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """The copies by their parameter's number, and the state of the loss scale.

    Args:
        content: What the file holds.
        groups: The names of the optimizer's parameters, by group.
        held: The names in the model file of the same rank.
        where: The file, for messages.

    Raises:
        CheckpointError: No copies are found, or their number is not that of the parameters.

    >>> import torch
    >>> read_fp16_state({"masters": [[torch.ones(2)]], "loss_scale": 8.0}, [["a", "b"]], {"b"}, "x.pt")
    ({1: tensor([1., 1.])}, {'loss_scale': 8.0})
    """
    if not isinstance(content, Mapping):
        content = {"masters": content}
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    for value in (content, *content.values()):
        found = _by_key(value, numbers)
        if found is None:
            found = _by_group(value, groups, held, numbers, where)
        if found is not None:
            return found, _scale(content)
    told = ", ".join(f"{key}: {type(value).__name__}" for key, value in content.items())
    raise CheckpointError(
        f"{where} has no 32-bit copies that weft can read ({told}): expected tensors by parameter name or number, or "
        "lists of them by group. Remove the file to go on from the 16-bit weights"
    )


def _by_key(value: Any, numbers: Mapping[str, int]) -> dict[int, Tensor] | None:
    if not isinstance(value, Mapping) or not value:
        return None
    known: dict[Any, int] = {number: number for number in numbers.values()}
    known.update(numbers)
    means = fitting((key for key in value if isinstance(key, str)), numbers)
    found = {means.get(key, key): tensor for key, tensor in value.items()}
    if all(key in known and isinstance(tensor, Tensor) for key, tensor in found.items()):
        return {known[key]: tensor for key, tensor in found.items()}
    return None


def _by_group(
    value: Any, groups: Sequence[Sequence[str]], held: Set[str], numbers: Mapping[str, int], where: str
) -> dict[int, Tensor] | None:
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], (list, tuple)):
        return None
    if not all(isinstance(tensor, Tensor) for group in value for tensor in group):
        return None
    here = [[name for name in group if name in held] for group in groups]
    counts, expected = [len(group) for group in value], [len(group) for group in here]
    if counts != expected:
        raise CheckpointError(
            f"{where} has groups of {counts} copies, but the model file of its rank has {expected} parameters of the "
            "optimizer's groups: build the optimizer as the script that saved it did"
        )
    return {
        numbers[name]: tensor
        for names, tensors in zip(here, value, strict=True)
        for name, tensor in zip(names, tensors, strict=True)
    }


def _scale(content: Mapping[Any, Any]) -> dict[str, Any]:
    inner = content.get("loss_scaler")
    if isinstance(inner, Mapping):
        scale = next((inner[name] for name in _SCALES if name in inner), None)
        return {**inner, **({} if scale is None else {"loss_scale": float(scale)})}
    scale = next((content[name] for name in _SCALES if name in content), inner)
    return {"loss_scale": float(scale)} if isinstance(scale, (int, float, Tensor)) else {}
