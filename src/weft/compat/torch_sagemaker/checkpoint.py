"""Checkpoints of the second version, in the format of ``torch.distributed.checkpoint``.

An optimizer's own ``state_dict()`` has this rank's shares and numbers in place of names, so every rank's is kept under
the rank. Such a checkpoint is loaded by as many ranks. Everything else is as PyTorch's own functions do it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from weft.errors import CheckpointError, ConfigError, UsageError
from weft.torch.tensors.pytree import nodes_with_paths


class SMStateDictType(Enum):
    """Contents of a model's ``state_dict()`` inside of :func:`sm_state_dict_type`."""

    SM_LOCAL_STATE_DICT = "local"


@contextmanager
def sm_state_dict_type(model: nn.Module, state_dict_type: SMStateDictType) -> Iterator[None]:
    """A context in which ``model.state_dict()`` has the shares of this rank, and ``load_state_dict`` takes them."""
    if not isinstance(state_dict_type, SMStateDictType):
        raise ConfigError(
            f"sm_state_dict_type got {state_dict_type!r}: give SMStateDictType.SM_LOCAL_STATE_DICT, or take PyTorch's "
            "FSDP.state_dict_type"
        )
    strategies = {
        module.sharding_strategy for module in model.modules() if isinstance(module, FullyShardedDataParallel)
    }
    if not strategies:
        yield
        return
    whole = ShardingStrategy.NO_SHARD in strategies
    kind = StateDictType.FULL_STATE_DICT if whole else StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind):
        yield


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Give an optimizer that has made no step the tensors of its state, for :func:`load` to fill; no weight changes."""
    if optimizer.state:
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if any(weight.grad is not None for weight in weights):
        raise UsageError(
            "init_optim_state got an optimizer with gradients: call it before the first backward pass"
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    for weight in weights:
        if weight.requires_grad and weight.numel():
            weight.grad = torch.zeros_like(weight)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


class DistributedFileSystemReader(dcp.FileSystemReader):
    """PyTorch's reader of a checkpoint's folder."""


class DistributedFileSystemWriter(dcp.FileSystemWriter):
    """PyTorch's writer of a checkpoint's folder."""


class PyTorchDistSaveShardedStrategy:
    """May be given to :func:`async_save`; changes nothing."""


class AsyncCallsQueue:
    """Has no calls to wait for: :func:`async_save` returns when the files are written."""

    def maybe_finalize_async_calls(self, blocking: bool = False, process_group: Any = None) -> list[int]:
        """The numbers of the calls that ended: none."""
        return []

    def get_num_unfinalized_calls(self) -> int:
        """The number of calls that have not ended: 0."""
        return 0

    def close(self) -> None:
        """Does nothing."""


def maybe_finalize_async_calls(blocking: bool = False, process_group: Any = None) -> list[int]:
    """The numbers of the calls that ended: none, for :func:`async_save` returns when the files are written."""
    return []


def async_save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
) -> None:
    """Write a checkpoint; it is complete when this returns.

    Args:
        state_dict: States, by names. All ranks of the group give theirs.
        checkpoint_id: The folder.
        storage_writer: In its place, a writer.
        planner: As for ``torch.distributed.checkpoint.save``.
        process_group: The ranks that write; without it, all.
        coordinator_rank: Changes nothing, as the arguments below.
        queue: As above.
        sharded_strategy: As above.
        wait_error_handling: As above.
        force_check_all_plans: As above.
        s3_region: Refused: files are in folders.
    """
    _refuse_s3(checkpoint_id, s3_region)
    dcp.save(
        _by_ranks(state_dict, process_group),
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
    )


save = async_save


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
) -> None:
    """Fill states, in place, with what a checkpoint has for their names.

    Args:
        state_dict: The states to fill. An optimizer's has to have its tensors, see :func:`init_optim_state`.
        checkpoint_id: The folder.
        storage_reader: In its place, a reader.
        planner: As for ``torch.distributed.checkpoint.load``.
        process_group: The ranks that read; without it, all.
        check_keys_matched: Changes nothing: a name that the checkpoint lacks is always an error.
        coordinator_rank: Changes nothing.
        s3_region: Refused: files are in folders.
    """
    _refuse_s3(checkpoint_id, s3_region)
    if storage_reader is None:
        if checkpoint_id is None:
            raise ConfigError(
                "load got neither checkpoint_id nor storage_reader: give it the checkpoint's folder"
            )
        storage_reader = DistributedFileSystemReader(checkpoint_id)
    kept = _by_ranks(state_dict, process_group)
    names = set(storage_reader.read_metadata().state_dict_metadata)
    for name, part in state_dict.items():
        if _is_optimizers(part):
            _check_states(name, kept[name]["by_ranks"], names)
    dcp.load(
        kept,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
    )
    for name, part in state_dict.items():
        if _is_optimizers(part):
            part["param_groups"] = kept[name]["param_groups"]  # tensors were filled in place
            (part["state"],) = kept[name]["by_ranks"].values()
        else:
            state_dict[name] = kept[name]


def _is_optimizers(part: Any) -> bool:
    """True for an optimizer's own ``state_dict()``, in which parameters have numbers, not names."""
    return (
        isinstance(part, dict)
        and {"state", "param_groups"} <= part.keys()
        and all(isinstance(number, int) for number in part["state"])
        and all(
            isinstance(number, int) for group in part["param_groups"] for number in group.get("params", ())
        )
    )


def _by_ranks(state_dict: dict[str, Any], group: Any) -> dict[str, Any]:
    """The states as they are kept: an optimizer's own under the number of the rank, for it has this rank's shares."""
    key = f"rank_{dist.get_rank(group)}_of_{dist.get_world_size(group)}"
    kept = dict(state_dict)
    for name, part in state_dict.items():
        if _is_optimizers(part):
            if any(
                isinstance(value, DTensor) for states in part["state"].values() for value in states.values()
            ):
                raise ConfigError(
                    f"{name!r} is the state_dict() of an optimizer of DTensors: give torch.distributed.checkpoint."
                    "state_dict.get_optimizer_state_dict(model, optimizer) in its place"
                )
            kept[name] = {"by_ranks": {key: part["state"]}, "param_groups": part["param_groups"]}
        elif place := _hidden(part, name):
            raise ConfigError(
                f"{place} is an optimizer's: its state has this rank's shares only, so put optimizer.state_dict() into "
                "the dict itself, under a name of its own"
            )
    return kept


def _hidden(part: Any, place: str) -> str:
    """Where an optimizer, or its own state, is found inside of something, or nothing."""
    nodes = nodes_with_paths(part, place)
    return next(
        (path for path, node in nodes if isinstance(node, torch.optim.Optimizer) or _is_optimizers(node)), ""
    )


def _check_states(name: str, by_ranks: dict[str, Any], names: set[str]) -> None:
    """Check that an optimizer's state asks for everything that was kept for this rank."""
    ((key, states),) = by_ranks.items()
    kept = {tuple(found.split(".")[2:5]) for found in names if found.startswith(f"{name}.by_ranks.")}
    ranks = {found[0].rpartition("_")[2] for found in kept}
    here = key.rpartition("_")[2]
    if ranks and here not in ranks:
        raise CheckpointError(
            f"the checkpoint's {name!r} was saved by {ranks.pop()} ranks, and {here} load it: start as many, or save "
            "FSDP.optim_state_dict(model, optimizer), which any number loads"
        )
    mine = {found[1:] for found in kept if found[0] == key and len(found) > 1}
    wanted = {(str(number), str(entry)) for number, entries in states.items() for entry in entries}
    if mine != wanted:
        wrong = ", ".join(".".join(found) for found in sorted(mine ^ wanted)[:3])
        raise CheckpointError(
            f"the checkpoint's {name!r} and the optimizer have other states, {wrong}: call init_optim_state(optimizer) "
            "before optimizer.state_dict(), and make the optimizer as it was made when saving"
        )


def _refuse_s3(folder: Any, region: str | None) -> None:
    if region is not None or str(folder).startswith("s3:"):
        raise ConfigError(
            f"the checkpoint's place is {folder}: give a folder that all ranks see, files go nowhere else"
        )
