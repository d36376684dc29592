"""The weights of a model with LoRA adapters of PEFT as those of the model without: what adapters add is added.

PEFT's ``merge_adapter`` does so in place, and then takes it away again, which leaves rounding in the weights. Here the
sum is made of a copy. PEFT itself computes what is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.checkpoint.named_state import owner_of
from weft.torch.model import DistributedModel
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.tensors.cut_weights import own
from weft.torch.tensors.pytree import is_wrapped

ADVICE = "stream them apart, merge_adapters=False"


@dataclass(frozen=True)
class Merged:
    """A sum that the adapters of a layer add to its weight. ``layer``: PEFT's. ``adapters``: their names, in order."""

    layer: Any
    adapters: Sequence[str]

    def add_to(self, weight: Tensor) -> Tensor:
        """A weight with what is added to it; collective over the ranks that hold parts of the adapters."""
        total = weight.clone()
        with _whole(self.layer):
            for name in self.adapters:
                total += self.layer.get_delta_weight(name)
        return total


@contextmanager
def _whole(layer: nn.Module) -> Iterator[None]:
    """Inside, the parameters of a layer's adapters are whole: they are small."""
    with ExitStack() as stack:
        for name, child in layer.named_children():
            for module in child.modules() if name != "base_layer" else ():
                held: dict[str, Any] = module._parameters
                for key in [*held]:
                    parameter = own(module, key)
                    if parameter is not None:
                        stack.callback(held.__setitem__, key, parameter)
                        held[key] = full_tensor(parameter.detach(), parameter)
        yield


def merged_names(model: DistributedModel) -> dict[str, tuple[str, Merged | None]] | None:
    """For each name in the model's state its name in the model without adapters, and what is added to it.

    What only adapters have is left out. None if there are no adapters.

    Raises:
        UsageError: A layer's adapter does something else than to add, or lies on another rank than the layer.
    """
    root = model.module
    layers = {n: m for n, m in root.named_modules() if isinstance(getattr(m, "base_layer", None), nn.Module)}
    kept = {
        n: m for n, m in root.named_modules() if {"modules_to_save", "original_module"} <= m._modules.keys()
    }
    others = [n for n, m in root.named_modules() if "original_module" in m._modules and n not in kept]
    if others:
        raise UsageError(f"the adapter of {others[0]} is none of LoRA: {ADVICE}")
    if not layers and not kept:
        return None
    merged = {name: _merged(model, name, layer) for name, layer in layers.items()}
    found: dict[str, tuple[str, Merged | None]] = {}
    for name in root.state_dict(keep_vars=True):
        above = [name[:at] for at, letter in enumerate(name) if letter == "."]
        layer = next((each for each in reversed(above) if each in layers or each in kept), None)
        if layer is None:
            found[name] = _plain(name), None
            continue
        inside = f"modules_to_save.{_active(kept[layer])[0]}." if layer in kept else "base_layer."
        rest = name.removeprefix(f"{layer}.")
        if rest.startswith(inside):
            added = merged[layer] if layer in layers and rest == "base_layer.weight" else None
            found[name] = _plain(f"{layer}.{rest.removeprefix(inside)}"), added
    return found


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _active(layer: Any) -> list[str]:
    names = layer.active_adapters
    return [names] if isinstance(names, str) else list(names)


def _adding_more(layer: Any) -> set[str]:
    """The adapters of a layer that are more than two factors."""
    return {*getattr(layer, "lora_variant", ())} | {
        name for name, is_on in getattr(layer, "lora_bias", {}).items() if is_on
    }


def _merged(model: DistributedModel, name: str, layer: Any) -> Merged | None:
    """The sum that a layer's active adapters add to its weight; None if there is none, or it is added already."""
    factors = [getattr(layer, each, {}) for each in ("lora_A", "lora_embedding_A")]
    if not hasattr(layer, "lora_A") or not hasattr(layer, "get_delta_weight"):
        raise UsageError(f"the adapter of {name} ({type(layer).__name__}) is none of LoRA: {ADVICE}")
    adapters = [
        each
        for each in _active(layer)
        if each not in layer.merged_adapters and any(each in some for some in factors)
    ]
    base = layer.base_layer
    plain = own(base, "weight") if isinstance(base, nn.Module) else None
    if adapters and (
        plain is None
        or is_wrapped(plain)
        or hasattr(layer, "parameter_name")
        or not _adding_more(layer).isdisjoint(adapters)
    ):
        raise UsageError(
            f"the adapter of {name} is not a plain sum of a weight and two factors (a quantised weight, DoRA, biases, "
            f"adapters of parameters): {ADVICE}"
        )
    owners = {
        owner_of(model, f"{name}.{each}")
        for each, _ in layer.named_parameters()
        if each == "base_layer.weight" or not each.startswith("base_layer.")
    }
    if len(owners) > 1:
        raise UsageError(
            f"the adapter of {name} lies on partitions {sorted(owners)}, so no rank can add it: {ADVICE}, or keep the "
            f"layer whole, weft.set_partition(module, index)"
        )
    return Merged(layer, adapters) if adapters else None
