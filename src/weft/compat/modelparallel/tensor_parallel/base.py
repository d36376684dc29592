"""The base of the transformer layers, activations, and arguments beside those that are documented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import UsageError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

WITHOUT_EFFECT = (
    "distribute_embedding", "flash_attention", "fused_bias_gelu", "fused_dropout", "fused_softmax",
    "query_key_layer_scaling",
)  # fmt: skip
"""Arguments that choose how something is computed, not what."""

REFUSED = {"zero_init": "set the weights after the module is built"}
"""Arguments that change what is computed, in a way that is not documented; with what to do instead."""


class DistributedModule(nn.Module):
    """The base of modules that replace others where layers are cut over ranks."""


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse arguments that would change the results and are not known.

    Raises:
        UsageError: One of them is on, or has a name that nobody knows.
    """
    kind = type(module).__name__
    for name, value in options.items():
        if name in REFUSED:
            if value:
                raise UsageError(f"{kind} does not support {name}={value!r}: {REFUSED[name]}")
        elif name not in WITHOUT_EFFECT:
            raise UsageError(
                f"{kind} has no argument {name}: docs/migration.md lists those that it has, and a layer of torch.nn "
                "that computes something else is cut over ranks as it is"
            )


def check_norms(module: nn.Module, before: bool, after: bool) -> None:
    """Raise :class:`UsageError` for a layer without any norm."""
    if not (before or after):
        raise UsageError(
            f"{type(module).__name__} needs pre_layernorm=True or post_layernorm=True: both are False"
        )


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name. Raises :class:`UsageError` for others than :data:`ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise UsageError(f"activation is {name!r}: choose {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def fill(module: nn.Module, deviation: float, normal: bool) -> None:
    """Give all linears in ``module`` weights from a normal distribution and biases of zero, if ``normal``; else they
    keep what ``nn.Linear`` gave them."""
    if normal:
        for each in module.modules():
            if isinstance(each, nn.Linear):
                nn.init.normal_(each.weight, std=deviation)
                if each.bias is not None:
                    nn.init.zeros_(each.bias)


def items_of(module: nn.Module, inputs: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The items of a layer's input tuple, in the order of ``names``.

    Raises:
        UsageError: It is no tuple of that length.
    """
    if not isinstance(inputs, (tuple, list)) or len(inputs) != len(names):
        given = f"{len(inputs)} items" if isinstance(inputs, (tuple, list)) else f"a {type(inputs).__name__}"
        raise UsageError(f"{type(module).__name__} takes one tuple ({', '.join(names)}), not {given}")
    return tuple(inputs)
