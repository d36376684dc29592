"""Linears that can be cut over ranks, and how the script asks for that; see ``weft.set_tensor_parallelism``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.errors import UsageError
from weft.torch.tensors.marks import WHOLE

_CONV1D = "transformers.pytorch_utils", "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """True if it is the ``Conv1D`` of `transformers`: a linear whose weight has the inputs first."""
    return (type(module).__module__, type(module).__name__) == _CONV1D


def is_linear(module: nn.Module) -> bool:
    """True if weft knows how to split the module; subclasses may do anything."""
    return type(module) is nn.Linear or is_transposed(module)


def features(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and of results of a linear."""
    shape = [*module.get_parameter("weight").shape]
    results, inputs = reversed(shape) if is_transposed(module) else shape
    return inputs, results


def wished(model: nn.Module) -> dict[str, str]:
    """The cut that the script wants for modules, by name; see ``weft.set_tensor_parallelism``."""
    found = {name: module.__dict__.get(WHOLE, (None,))[0] for name, module in model.named_modules()}
    return {name: how for name, how in found.items() if isinstance(how, str)}


def refuse_whole(model: nn.Module, faults: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` if modules cannot be split, and why, of which the script has said how to split them."""
    wanted = wished(model)
    faults = {name: why for name, why in faults.items() if name in wanted}
    if faults:
        told = "; ".join(
            f'{name} is set to "{wanted[name]}", and {why}' for name, why in sorted(faults.items())
        )
        raise UsageError(
            f"not all modules can be cut as weft.set_tensor_parallelism says: {told}. Write True to let "
            "weft decide, or False to keep it whole"
        )
