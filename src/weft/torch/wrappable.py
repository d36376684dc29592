"""The modules that ``DistributedModel`` takes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.errors import UsageError
from weft.torch.keras_layers import is_of_keras, open_layers


def check_wrappable(module: Any) -> None:
    """Refuse what is no module, has parameters without a shape, or averages gradients itself; open layers of Keras."""
    if not isinstance(module, nn.Module):
        keras = ": weft.tensorflow splits models of Keras on TensorFlow, weft.torch those with KERAS_BACKEND=torch"
        raise UsageError(
            f"DistributedModel takes an nn.Module, not {type(module).__name__}{keras if is_of_keras(module) else ''}"
        )
    open_layers(module)
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = [
        name for name, tensor in named if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
    ]
    if lazy:
        raise UsageError(
            f"the model has parameters without a shape ({', '.join(lazy[:5])}): a lazy module makes them when it is "
            "first called. Call the module with an example before it is wrapped: module(example)"
        )
    if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
        raise UsageError(
            "the model has a DistributedDataParallel inside, which would average gradients a second time, and wait "
            "for parameters of other ranks: leave it out, weft averages over replicas by itself"
        )
