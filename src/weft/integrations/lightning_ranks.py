"""The common part of Lightning's Trainer and Fabric: who the ranks are, how they talk, what a precision may be."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.communication import objects
from weft.errors import UsageError
from weft.integrations.alike import refuse_apart
from weft.launch.discovery import discover
from weft.reduce.exchange import EXTREMES, all_reduce_extreme
from weft.session import ranks
from weft.torch import join
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.session import current
from weft.untrusted import MOST_RANKS, whole


def _library() -> Any:
    """`lightning.pytorch`, or `pytorch_lightning` if that is the one which the script uses."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("weft.integrations.lightning needs Lightning: pip install lightning")


pl: Any = _library()
fabric: Any = importlib.import_module(
    "lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric"
)
_environments: Any = importlib.import_module(f"{fabric.__name__}.plugins.environments")
_rank_zero: Any = importlib.import_module(f"{fabric.__name__}.utilities.rank_zero")


PRECISIONS = ("32-true", "bf16-mixed")
_PLUGINS = ("Precision", "MixedPrecision")


class Ranks(_environments.ClusterEnvironment):
    """Who this process is, as any launcher that weft knows has set it."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return discover(os.environ).port or 0

    @staticmethod
    def detect() -> bool:
        return discover(os.environ).world_size > 1

    def world_size(self) -> int:
        return discover(os.environ).world_size

    def set_world_size(self, size: int) -> None:
        return

    def global_rank(self) -> int:
        return discover(os.environ).rank

    def set_global_rank(self, rank: int) -> None:
        return

    def local_rank(self) -> int:
        return ranks.local_rank() if current.is_initialized() else discover(os.environ).local_rank

    def node_rank(self) -> int:
        return whole(os.environ.get("GROUP_RANK", ""), MOST_RANKS) or 0


class JoinsJob:
    """The part of a strategy that asks other ranks."""

    cluster_environment: Any
    parallel_devices: Any
    settings: dict[str, Any]

    @property
    def root_device(self) -> torch.device:
        if current.is_initialized():
            return current.session().device
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.cluster_environment.local_rank() % len(devices)]

    def _configure_launcher(self) -> None:
        _rank_zero.rank_zero_only.rank = self.cluster_environment.global_rank()

    def join(self, precision: Any) -> None:
        """Join the job, or refuse what it was asked for."""
        if (
            getattr(precision, "precision", None) not in PRECISIONS
            or type(precision).__name__ not in _PLUGINS
        ):
            raise UsageError(
                f"WeftStrategy cannot train with precision={getattr(precision, 'precision', precision)!r}: choose one "
                f"of {', '.join(PRECISIONS)}"
            )
        join.init(self.settings)
        refuse_apart()
        device, wanted = (
            current.session().device.type,
            (self.parallel_devices or [torch.device("cpu")])[0].type,
        )
        if device != wanted:
            raise UsageError(
                f"accelerator= is for {wanted}, but weft runs this rank on {device}: start it with weft run --device "
                "cpu, or leave out accelerator="
            )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if current.is_initialized():
            objects.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not current.is_initialized() or ranks.size() == 1:
            return obj
        if ranks.rank() != src:
            return objects.recv_from(src)
        objects.broadcast(obj)
        return obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the replicas: the ranks of one have the same."""
        if not isinstance(tensor, Tensor) or ranks.rdp_size() == 1:
            return tensor
        mean = str(reduce_op).lower() in ("none", "mean", "avg")
        how = dist.ReduceOp.SUM if mean else _operation(reduce_op)
        result = tensor.to(
            "cpu", torch.float32 if mean and not tensor.is_floating_point() else None, copy=True
        )
        with current.session().doing("a value that the Trainer adds up"):
            reduce = all_reduce_extreme if how in EXTREMES else dist.all_reduce
            reduce(result, how, current.session().group("rdp"))
        return (result / ranks.rdp_size() if mean else result).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The same on every rank, also if ranks of one copy thought otherwise."""
        decisions = objects.allgather(bool(decision))
        return min(decisions) if all else max(decisions)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UsageError(
                "all_gather(sync_grads=True) has no way back through a split model: gather without it"
            )
        if ranks.rdp_size() == 1:
            return tensor
        parts = objects.allgather(tensor.detach(), objects.RDP_GROUP)
        return torch.stack([part.to(tensor.device) for part in parts])


def _operation(reduce_op: Any) -> Any:
    names = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    if isinstance(reduce_op, str) and reduce_op.lower() in names:
        return names[reduce_op.lower()]
    return reduce_op


def wrapped(optimizer: Any) -> Any:
    """As `DistributedOptimizer`, under the name of its own class, by which callbacks call what they log."""
    if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    made = DistributedOptimizer(optimizer)
    made.__class__ = type(type(optimizer).__name__, (DistributedOptimizer,), {})
    return made
