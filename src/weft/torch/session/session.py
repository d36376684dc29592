"""The session of a PyTorch process: devices, groups and models, beside what every framework's session knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime.allocator import Growth
from weft.runtime.executor import Executor
from weft.runtime.huge_pages import HugePages
from weft.runtime.lockstep import LockstepOrder
from weft.session import session as base
from weft.torch.session.device import rings_of
from weft.torch.session.lockstep import SharedTurns, TensorRanks
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.transport.channel import Channel, Mailbox
from weft.transport.groups import default_takes_host_tensors
from weft.transport.torch_dist import TorchChannel


@dataclass
class Proofs:
    """State of the comparisons of steps with one process.

    Attributes:
        unproved: Why steps are not compared.
        by_unit: Whether no rank holds all of the models, so that they run there unit by unit.
        models: Those that are compared, for ``weft verify``.
        left: What the last compared step has left in the modules of other ranks.
    """

    unproved: str = ""
    by_unit: bool = False
    models: Sequence[Any] = ()
    left: Any = None


@dataclass(kw_only=True)
class Session(base.Session):
    """This process's place in the job, for PyTorch.

    Attributes:
        device: Where this rank's part of the model lies.
        streams: The random number generators of this process.
        pipeline: What all microbatches share on this rank; None without a pipeline.
        replicas: The channel to the ranks with the same part of the model, once something needs it.
        tensor: The ranks with other parts of the same weights or sequences.
        turns: The turns that replicas take together.
        nccl: Whether ranks have GPUs of their own, and NCCL is there.
        normalisers: How many SyncBatchNorm modules were made.
        first_inputs: Whether only the inputs of the pipeline's first rank count.
        changes: What the script has changed in its models since they were split, in words.
        growth: Gives memory of the host back.
        huge_pages: Joins memory of the host.
        went_backward: Whether a step has had a backward pass.
        proofs: What the comparison of one step with one process leaves for the next.
        agreement: What this rank has that all must have alike, an ``Agreement``.
        activations: What autograd keeps outside of the device, an ``Activations``; None without
            ``offload_activations``.
        rebalance: Who compares the times of ranks and moves units between steps, a ``Rebalance``; None without the
            setting.
    """

    device: torch.device
    streams: Streams
    pipeline: Pipeline | None = None
    replicas: TorchChannel | None = None
    tensor: TensorRanks = field(default_factory=TensorRanks)
    turns: SharedTurns = field(default_factory=SharedTurns)
    nccl: bool = False
    normalisers: int = 0
    first_inputs: bool = False
    changes: list[str] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)
    huge_pages: HugePages = field(default_factory=HugePages)
    went_backward: bool = False
    proofs: Proofs = field(default_factory=Proofs)
    agreement: Any = None
    activations: Any = None
    rebalance: Any = None

    @property
    def weights_device(self) -> torch.device:
        """Where weights come to be that the device may have no room for all of: host memory, if they wait there."""
        return torch.device("cpu") if self.settings.offload_weights else self.device

    @property
    def channel(self) -> Channel | None:
        """The pipeline's channel, if there is a pipeline."""
        return None if self.pipeline is None else self.pipeline.channel

    @property
    def channels(self) -> list[Channel]:
        """All channels of this rank."""
        found = (self.channel, self.replicas, self.tensor.channel, self.turns.channel)
        return [each for each in found if each is not None]

    def connect(self, pipeline: Pipeline, executor: Executor) -> None:
        """Run microbatches over this pipeline, by this executor."""
        self.pipeline, self.executor = pipeline, executor

    def number_normaliser(self) -> int:
        """A number for a new SyncBatchNorm module, the same on every rank."""
        self.need_all_replicas("SyncBatchNorm")
        self.normalisers += 1
        return self.normalisers

    def use_inputs(self, first: bool) -> None:
        """Say whether only the inputs of the pipeline's first rank count."""
        self.first_inputs = first

    def group(self, axis: str) -> Any:
        """The ``torch.distributed`` group of this rank along ``axis``.

        ``None`` for a single process without a pipeline.
        """
        ranks = self.peers(axis)
        if self.place.world_size == 1 and self.pipeline is None and not self.settings.offload_weights:
            return None
        if axis == "world" and (default_takes_host_tensors() or self.rehearsal is not None):
            return dist.group.WORLD
        if ranks not in self.groups and self.rehearsal is not None:
            self.groups[ranks] = dist.new_group(ranks)
        if ranks not in self.groups:  # this rank alone, so nobody else needs to take part
            self.groups[ranks] = dist.new_group(ranks, self.timeout, "gloo", use_local_synchronization=True)
        return self.groups[ranks]

    @property
    def reads(self) -> str:
        """The axis along which ranks read other samples."""
        return "dp" if self.settings.inputs == "per_rank" else "rdp"

    def connect_tensor(self, mailbox: Mailbox) -> LockstepOrder | None:
        """The turns of the ranks that split tensors, which are connected from now on. Every rank calls this."""
        if self.mesh.tp > 1:
            split = self.settings.tensor_parallel_degree
            with self.doing("the ranks that split tensors"):
                self.tensor = TensorRanks.connect(
                    self.mesh, self.rank, split, mailbox, self.device, self.timeout, self.nccl
                )
        return self.tensor.turns

    def share_turns(self, degree: int) -> None:
        """From now on every ``degree`` replicas, and the ranks that split tensors with them, take the same turns.

        Every rank calls this. ``degree``: 1 where only ranks that split tensors do.
        """
        assert self.executor is not None
        if degree == self.turns.degree:
            return
        self.turns.end()
        if degree == 1:
            self.executor.turns = self.tensor.turns
            return
        row, after = self.position("rdp") // degree, self.mesh.rdp + self.mesh.tp
        ranks = [rank for rank in self.peers("stage") if self.mesh.position("rdp", rank) // degree == row]
        with self.doing("the ranks that share parameters"):
            here = ranks.index(self.rank)
            self.turns.begin(degree, ranks, here, after, self.executor, self.device, self.timeout)

    def connect_replicas(self) -> None:
        """A channel between the ranks with the same part of the model, beside the pipeline's; every rank calls this."""
        if self.pipeline is None or self.replicas is not None or self.mesh.rdp == 1:
            return
        with self.doing("the channel between replicas"):
            made = {ranks: dist.new_group(ranks, self.timeout, "gloo") for ranks in self.mesh.groups("rdp")}
            group = made[self.peers("rdp")]
            rings = rings_of(group, self.device)
        self.replicas = TorchChannel(group, self.device, mailbox=self.pipeline.channel.mailbox, rings=rings)
