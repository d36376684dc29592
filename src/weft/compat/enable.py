"""Turns the names on: for this process, or for a process to be started.

The names are ordinary files in the folder ``path``, so that ``importlib.util.find_spec("smdistributed")`` gives an
ordinary spec. A process that is started with the folder in ``PYTHONPATH`` also finds the ``sitecustomize`` there, which
calls :func:`enable` before the script begins.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.compat.refused import refuse_lonely_mpi
from weft.compat.torch_sagemaker import names
from weft.compat.variables import DEFAULTS, DEVICE, FRAMEWORK, OPEN_MPI, PARAMETERS
from weft.errors import ConfigError, FormatError
from weft.import_hooks import when_imported
from weft.untrusted import MOST_RANKS, parse_json, shown_text, whole

FOLDER = Path(__file__).parent / "path"
MODULES = Path(__file__).parent / "stand_ins"
"""Names of other packages, for processes in which those are not installed: the last place to look."""

_LAYERS = {"seq_layers": "h"}
_HALVES = {"attention": "attn", "output": "mlp"}
_LAYER_NAMES = {
    "transformers.models.gpt2.modeling_gpt2": {
        "GPT2Model": _LAYERS,
        "GPT2Block": {**_HALVES, "cross_attention": "crossattention"},
    },
    "transformers.models.gptj.modeling_gptj": {"GPTJModel": _LAYERS, "GPTJBlock": _HALVES},
    "transformers.models.gpt_neo.modeling_gpt_neo": {"GPTNeoModel": _LAYERS, "GPTNeoBlock": _HALVES},
}
"""For each module of ``transformers`` its classes, with the original's names for parts of them and their own.

The original puts a transformer of its own there.
"""

_enabled = False


def enable() -> None:
    """Make ``import smdistributed.modelparallel.torch as smp`` and its like work in this process; harmless twice.

    ``import torch.sagemaker as tsm`` is among them.

    Call it before the script imports ``transformers``, which looks for the names at its own import.
    """
    global _enabled
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    if str(MODULES) not in sys.path:
        sys.path.append(str(MODULES))
    if not _enabled:
        _enabled = True
        names.install()
        os.environ |= open_mpi_environ(os.environ)
        if "WEFT_SHARED_FD" in os.environ and "LOCAL_RANK" in os.environ:  # Hugging Face's Trainer reads it
            os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", os.environ["LOCAL_RANK"])
        when_imported("torch", _torch_is_there)
        when_imported("accelerate.accelerator", _accelerate_is_there)
        when_imported("transformers.training_args", _arguments_are_there)
        when_imported("transformers.trainer", _trainer_is_there)
        for name in _LAYER_NAMES:
            when_imported(name, _layers_are_there)
        when_imported("mpi4py.MPI", _mpi_is_there)


def open_mpi_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Open MPI's variables for a rank that another launcher started: scripts for the original read them."""
    if OPEN_MPI.format("RANK") in environ or "WEFT_SHARED_FD" not in environ:
        return {}
    names = {
        "RANK": "RANK",
        "SIZE": "WORLD_SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    }
    return {OPEN_MPI.format(name): environ[own] for name, own in names.items() if own in environ}


def _torch_is_there(torch: ModuleType) -> None:
    """Let PyTorch be as scripts for the original expect it; not where it only carries messages of TensorFlow.

    ``weft.torch`` would bring PyTorch's compiler, whose LLVM ends a process that has the one of TensorFlow.
    """
    if "weft.tensorflow" in sys.modules:
        return
    from weft.compat import plain_data
    from weft.compat.cuda import is_cpu, lightning_is_cpu
    from weft.compat.dataparallel import smddp

    wanted = os.environ.get(DEVICE, "")
    if wanted == "cpu" or (wanted != "cuda" and not torch.cuda.is_available()):
        is_cpu.install(pretend=wanted == "cpu")
    smddp.install()
    plain_data.allow()
    for name in lightning_is_cpu.CONNECTORS:
        when_imported(name, lightning_is_cpu.install)
    when_imported(lightning_is_cpu.ENVIRONMENTS, lightning_is_cpu.former_module)


def _accelerate_is_there(accelerator: ModuleType) -> None:
    from weft.compat.hf import operations, ranks, steps
    from weft.compat.modelparallel.session import state

    ranks.install(accelerator)
    operations.install(lambda: state.initialized and not steps.inside())


def _arguments_are_there(module: ModuleType) -> None:
    from weft.compat.hf import options

    options.arguments(module)


def _trainer_is_there(module: ModuleType) -> None:
    from weft.compat.hf import steps

    steps.install(module)


def _layers_are_there(module: ModuleType) -> None:
    """Let the classes of one of these modules answer to the original's names."""
    for cls, parts in _LAYER_NAMES[module.__name__].items():
        for name, own in parts.items():
            setattr(getattr(module, cls), name, property(operator.attrgetter(own)))


def _mpi_is_there(module: ModuleType) -> None:
    """Refuse MPI under ``weft run``, where every rank would be alone in MPI."""
    ranks = whole(os.environ.get("WORLD_SIZE", ""), MOST_RANKS) if "WEFT_SHARED_FD" in os.environ else None
    if ranks is not None and ranks > 1 and module.COMM_WORLD.Get_size() == 1:
        refuse_lonely_mpi(ranks)


def launch_environ(
    environ: Mapping[str, str],
    arguments: Sequence[str] = (),
    partitions: int | None = None,
    device: str | None = None,
) -> dict[str, str]:
    """The variables to add to the environment of a process that is to find the names.

    Args:
        environ: The environment that it would get otherwise.
        arguments: The script's arguments; ``--mp_parameters k=v,k=v`` among them become ``SM_HP_MP_PARAMETERS``.
        partitions: Their number, if neither the script nor its environment gives one.
        device: ``cpu`` to hide all GPUs and let calls for CUDA mean the CPU.
    """
    paths = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    added = {"PYTHONPATH": os.pathsep.join([str(FOLDER), *(part for part in paths if part != str(FOLDER))])}
    if device is not None:
        added[DEVICE] = device
    if device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    given = mp_parameters(arguments)
    framework = _framework(environ)
    if PARAMETERS not in environ and given:
        added[PARAMETERS] = json.dumps(given)
    elif PARAMETERS not in environ and partitions and not framework.get(DATA_PARALLEL):
        added[PARAMETERS] = json.dumps({"partitions": partitions})
        added[DEFAULTS] = "1"
    if (PARAMETERS in environ or PARAMETERS in added) and not framework.get(DATA_PARALLEL):
        added[FRAMEWORK] = json.dumps({"sagemaker_mpi_enabled": True, **framework})
    return added


DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"


def _framework(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(FRAMEWORK, "").strip() or "{}"
    try:
        content = parse_json(text, f"{FRAMEWORK} is not JSON")
    except FormatError as error:
        raise ConfigError(f"{error}; leave it out, or write an object") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{FRAMEWORK} holds {shown_text(text)}: leave it out, or write an object")
    return content


def mp_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that ``--mp_parameters partitions=2,microbatches=4`` among a script's arguments gives."""
    text = ""
    for number, argument in enumerate(arguments):
        if argument == "--mp_parameters" and number + 1 < len(arguments):
            text = arguments[number + 1]
        elif argument.startswith("--mp_parameters="):
            text = argument.partition("=")[2]
    result: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f'--mp_parameters has "{shown_text(pair)}": write name=value pairs with commas, for example '
                "partitions=2,microbatches=4"
            )
        try:
            result[name] = parse_json(value.lower() if value in ("True", "False") else value)
        except FormatError:
            result[name] = value
    return result
