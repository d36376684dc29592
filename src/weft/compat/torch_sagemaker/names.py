"""``import torch.sagemaker``: a finder that makes the modules of that name out of two tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from weft.compat.refused import MissingPart, refuse_unknown

ROOT = "torch.sagemaker"

PLACES: Mapping[str, Mapping[str, str]] = {}
"""For each module the names that work, each with the file here that has it."""

LAYERS = (
    "weft leaves the model's own layers as they are, so write the layer's class of transformers in its place, for "
    "example transformers.models.llama.modeling_llama.LlamaDecoderLayer"
)
ATTENTION = (
    "delete it and load the model with attn_implementation='sdpa', which is PyTorch's scaled_dot_product_attention "
    "and uses flash kernels on a GPU"
)
EXPERTS = (
    "for experts on several ranks give weft.torch.DistributedModel(model) the setting expert_parallel_degree, or "
    "delete the argument config=... of transform to train them whole on every rank"
)
MISSING: Mapping[str, Mapping[str, str]] = {
    "": {},
    "distributed": {},
    "distributed.fsdp": {},
    "distributed.fsdp.fully_sharded_data_parallel": {
        "register_tp_processing_pre_comm_hook": "delete the call: nothing is cut into tensor-parallel parts here"
    },
    "moe": {},
    "moe.moe_config": {"MoEConfig": EXPERTS},
    "moe.moe_layer": {"MoELayer": EXPERTS},
    "nn": {},
    "nn.attn": {"FlashSelfAttention": ATTENTION, "CoreAttention": ATTENTION},
    "nn.huggingface": {},
    "nn.huggingface.llama_flashattn": {"LlamaFlashAttention": ATTENTION},
    "tensor_parallel": {},
    "tensor_parallel.transformer": {"TETransformerLayer": LAYERS, "TransformerLayer": LAYERS},
}
"""For each module the names that are refused, each with what to do instead."""
AT_IMPORT = ("tensor_parallel.transformer",)
"""Modules whose names stand in wrapping policies, where one without instances would wrap nothing in silence."""


class Finder(MetaPathFinder, Loader):
    """Makes the modules of the tables."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        if inside(fullname) not in {*PLACES, *MISSING}:
            raise MissingPart(
                f"weft has no module {fullname}: docs/migration.md lists what it has of the second version"
            )
        return ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = inside(module.__name__)

        def look_up(wanted: str) -> Any:
            value = looked_up(name, wanted)
            setattr(module, wanted, value)
            return value

        setattr(module, "__getattr__", look_up)  # noqa: B010  # mypy knows no such attribute of modules


def install() -> None:
    """Let ``import torch.sagemaker`` find the modules, unless they are installed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def inside(module: str) -> str:
    """The name under ``torch.sagemaker``."""
    return module[len(ROOT) + 1 :]


def looked_up(module: str, name: str) -> Any:
    """What the module has under the name."""
    if name in PLACES.get(module, {}):
        return getattr(importlib.import_module(f"{__package__}.{PLACES[module][name]}"), name)
    dotted = f"{module}.{name}" if module else name
    if dotted in {*PLACES, *MISSING}:
        return importlib.import_module(f"{ROOT}.{dotted}")
    if name in MISSING.get(module, {}):
        sentence = f"{ROOT}.{dotted} is not supported: {MISSING[module][name]}"
        if module in AT_IMPORT:
            raise MissingPart(sentence)
        return refused(name, sentence)
    return refuse_unknown(f"{ROOT}.{module}" if module else ROOT, name)


def refused(name: str, sentence: str) -> type:
    """A class that may be imported and asked about, and refuses to be used: scripts import more than they use."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise MissingPart(sentence)

    def attribute(cls: type, wanted: str) -> NoReturn:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        raise MissingPart(sentence)

    return type("Refused", (type,), {"__call__": refuse, "__getattr__": attribute})(name, (), {})
