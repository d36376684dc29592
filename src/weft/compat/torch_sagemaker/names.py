"""``import torch.sagemaker``: a finder that makes the modules of that name out of two tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from weft.compat.refused import MissingModule, MissingPart, refuse_unknown

ROOT = "torch.sagemaker"

PLACES: Mapping[str, Mapping[str, str]] = {
    "": {"init": "state", "state": "state", "transform": "transform"},
    "checkpoint.utils": dict.fromkeys(("SORT_BY_LAST_INT", "limit_num_subdirs"), "tools"),
    "delayed_param": {"DelayedParamIniter": "delayed_param"},
    "distributed.checkpoint.async_utils": {"AsyncCallsQueue": "checkpoint"},
    "distributed.checkpoint.filesystem": dict.fromkeys(
        ("DistributedFileSystemReader", "DistributedFileSystemWriter"), "checkpoint"
    ),
    "distributed.checkpoint.state_dict_loader": {"load": "checkpoint"},
    "distributed.checkpoint.state_dict_saver": dict.fromkeys(
        ("PyTorchDistSaveShardedStrategy", "async_save", "maybe_finalize_async_calls", "save"), "checkpoint"
    ),
    "distributed.checkpoint.state_dict_utils": dict.fromkeys(
        ("SMStateDictType", "init_optim_state", "sm_state_dict_type"), "checkpoint"
    ),
    "grad_norm": {"clip_grad_norm_": "tools"},
    "logger": {"get_logger": "tools"},
    "utils.process_group_utils": {"get_global_ranks": "tools"},
    "utils.utils": {"timeit": "tools"},
}
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
FILES = (
    "save with torch.sagemaker.distributed.checkpoint.state_dict_saver.async_save, and load with "
    "torch.sagemaker.distributed.checkpoint.state_dict_loader.load"
)
MISSING: Mapping[str, Mapping[str, str]] = {
    "checkpoint": {},
    "distributed": {},
    "distributed.checkpoint": {},
    "distributed.fsdp": {},
    "distributed.fsdp.checkpoint": dict.fromkeys(
        (
            "EXPORT_KEY_IDENTITY",
            "EXPORT_KEY_MODEL",
            "EXPORT_KEY_OPTIMIZER",
            "EXPORT_KEY_SCHEDULER",
            "load_model_checkpoint",
            "save_model_checkpoint",
        ),
        FILES,
    ),
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
    "utils": {},
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
            raise MissingModule(
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
    """The module's attribute of that name."""
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
