"""The job and its division: the two values that every formula of this room takes."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError
from weft.graph.sizes import RECOMPUTE, Sizes
from weft.machines.accelerator import BYTES_OF, DTYPES
from weft.plan.parallelism.adapters import BITS

STATES = {"adam": 8, "adam8bit": 2, "momentum": 4, "sgd": 0, "adafactor": 0}
"""Bytes of an optimizer's states for each parameter: two moments of 4 bytes, of 1 byte, one moment, none. Adafactor
keeps sums of rows and columns, which are next to nothing (Shazeer and Stern, arXiv 1804.04235)."""
SHARDED = ("none", "optimizer", "parameters")
"""What data-parallel ranks share among them: nothing, optimizer states (ZeRO-1), states with gradients and parameters
(ZeRO-3, FSDP); Rajbhandari et al., arXiv 1910.02054."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "zb_2p")
"""weft's names: GPipe, 1F1B, 1F1B with several chunks, and zero-bubble schedules; `zb_2p` is the paper's only."""


@dataclass(frozen=True)
class Job:
    """The job: a model and how it is trained.

    Attributes:
        sizes: The model.
        batch: Sequences of a step, on all ranks together.
        precision: The dtype of matrix products.
        optimizer: One of `STATES`.
        fused_attention: Whether attention keeps its scores out of memory (flash attention, arXiv 2205.14135).
        eager: Whether every operation between products is a kernel of its own, as in PyTorch without `torch.compile`.
        gradient_bytes: Of a gradient in its sum: 4, or 2 where replicas exchange 16 bits.
        scatters: Whether replicas that share optimizer states get the sum of their share of the gradients only (ZeRO's
            stage 2, arXiv 1910.02054). With weft each gets all of it (stage 1).
        lora: The rank of the adapters that are trained in place of the model; 0: the model itself is trained.
        quantized: Bits of the frozen linears, one of `adapters.BITS`; 0: as products read them.
        offload_optimizer: Whether the optimizer's states wait in host memory (Ren et al., ZeRO-Offload, arXiv
            2101.06840, with the update on the device).
        offload_weights: Whether weights wait in host memory, but for the layers that run.
    """

    sizes: Sizes
    batch: int
    precision: str = "bf16"
    optimizer: str = "adam"
    fused_attention: bool = True
    gradient_bytes: int = 4
    eager: bool = False
    scatters: bool = False
    lora: int = 0
    quantized: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.batch < 1:
            faults.append(f"the batch is {self.batch} sequences, it must be at least 1")
        if self.precision not in DTYPES:
            faults.append(f'the precision is "{self.precision}", it must be one of {", ".join(DTYPES)}')
        if self.optimizer not in STATES:
            faults.append(f'the optimizer is "{self.optimizer}", it must be one of {", ".join(STATES)}')
        if self.lora < 0:
            faults.append(f"the rank of the adapters is {self.lora}, it must be at least 1")
        if self.quantized not in (0, *BITS):
            faults.append(
                f"frozen weights have {self.quantized} bits, it must be {' or '.join(map(str, BITS))}"
            )
        if self.quantized and not self.lora:
            faults.append(f"weights of {self.quantized} bits cannot be trained: train adapters, --lora 16")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def linear_bytes(self) -> float:
        """Of a parameter of a layer's linears, as memory holds it."""
        return BITS[self.quantized] / 8 if self.quantized else float(self.parameter_bytes)

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter as products read it."""
        return BYTES_OF[self.precision]

    @property
    def state_bytes(self) -> int:
        """Of a parameter's optimizer states, with the copy of 32 bits that mixed precision keeps."""
        return STATES[self.optimizer] + (4 if self.parameter_bytes < 4 else 0)


@dataclass(frozen=True)
class Division:
    """The division of a job over ranks: tensor x context x data x pipeline of them, numbered in that order.

    Attributes:
        data: Replicas, each with its own sequences.
        tensor: Ranks that share every matrix; what lies between matrices is split along the sequence, if `along`.
        pipeline: Ranks in a row, each with its own layers.
        chunks: Stages of a rank.
        context: Ranks that share every sequence.
        sharded: One of `SHARDED`.
        schedule: One of `SCHEDULES`.
        microbatch: Sequences that a replica runs at once.
        recompute: One of `weft.graph.sizes.RECOMPUTE`.
        along: Whether tensor-parallel ranks split the sequence, too (sequence parallelism, arXiv 2205.05198).
        scattered: Whether each of them sends only its part to the next stage (arXiv 2104.04473, section 4.1).
        experts: Replicas that share the experts of every layer, each of them with its own ones (expert parallelism;
            Lepikhin et al., GShard, arXiv 2006.16668).
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    sharded: str = "none"
    schedule: str = "1f1b"
    microbatch: int = 1
    recompute: str = "none"
    along: bool = True
    scattered: bool = True
    experts: int = 1

    def __post_init__(self) -> None:
        names = ("data", "tensor", "pipeline", "chunks", "context", "microbatch", "experts")
        faults = [
            f"{name} is {value}, it must be at least 1"
            for name in names
            if (value := getattr(self, name)) < 1
        ]
        faults += [
            f'{name} is "{value}", it must be one of {", ".join(known)}'
            for name, value, known in (
                ("sharded", self.sharded, SHARDED),
                ("schedule", self.schedule, SCHEDULES),
                ("recompute", self.recompute, RECOMPUTE),
            )
            if value not in known
        ]
        if not faults and self.data % self.experts:
            faults.append(
                f"experts are shared by {self.experts} replicas, which must divide data, {self.data}"
            )
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def alike(self) -> int:
        """Ranks that have the same parameters, but for experts: replicas and context-parallel ranks."""
        return self.data * self.context

    @property
    def alike_experts(self) -> int:
        """Ranks that have the same experts."""
        return self.alike // self.experts

    @property
    def stages(self) -> int:
        """The number of stages that a microbatch runs through."""
        return self.pipeline * self.chunks

    def microbatches(self, job: Job) -> int:
        """The number of microbatches of a replica in a step."""
        return job.batch // (self.data * self.microbatch)

    def __str__(self) -> str:
        parts = [f"data {self.data}"]
        parts += [
            f"{name} {value}"
            for name in ("experts", "context", "tensor", "pipeline")
            if (value := getattr(self, name)) > 1
        ]
        if self.pipeline > 1:
            parts.append(self.schedule if self.chunks == 1 else f"{self.schedule} x{self.chunks}")
        if self.sharded != "none":
            parts.append(f"sharded {self.sharded}")
        if self.tensor > 1 and not self.along:
            parts.append("whole sequences")
        parts.append(f"microbatch {self.microbatch}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        return ", ".join(parts)
