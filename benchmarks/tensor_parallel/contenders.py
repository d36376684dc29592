"""Ways to cut the GPT's layers over processes: PyTorch's `parallelize_module`, and weft, alone and in hybrids."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.contenders import OneProcess, Weft
from benchmarks.gpt import Attention
from benchmarks.turns.contender import Contender


@dataclass(frozen=True)
class Task(contenders.Task):
    """The task of the other comparisons; `CONTENDERS` of this module are those that train it."""

    microbatches: int = 1


class CutAttention(nn.Module):
    """What a user of `parallelize_module` writes in the place of the GPT's attention: three linears, and the number of
    heads that one process has."""

    def __init__(self, whole: Attention, ranks: int) -> None:
        super().__init__()
        self.heads = whole.heads // ranks
        width = whole.out.in_features
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            for number, linear in enumerate((self.query, self.key, self.value)):
                linear.weight.copy_(whole.qkv.weight.chunk(3)[number])
                linear.bias.copy_(whole.qkv.bias.chunk(3)[number])
        self.out = whole.out

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            linear(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Parallelized(OneProcess):
    """PyTorch's `torch.distributed.tensor.parallel.parallelize_module`, after the attention was rewritten for it."""

    ranks = 2

    def connect(self) -> None:
        importlib.import_module("torch.distributed.tensor.parallel")
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))

    def build(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.model = self.task.model()
        mesh = init_device_mesh("cpu", (self.ranks,))
        columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        for block in self.model.blocks:
            block.attention = CutAttention(block.attention, self.ranks)
            rows = {"attention.out": RowwiseParallel(), "mlp.2": RowwiseParallel()}
            parallelize_module(block, mesh, {**columns, "mlp.0": ColwiseParallel(), **rows})

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters with whole gradients, under the GPT's own names."""
        grads = {n: _whole(p.grad) for n, p in self.model.named_parameters()}
        for number in range(len(self.model.blocks)):
            start = f"blocks.{number}.attention"
            for kind in ("weight", "bias"):
                parts = [grads.pop(f"{start}.{name}.{kind}") for name in ("query", "key", "value")]
                grads[f"{start}.qkv.{kind}"] = torch.cat(parts)
        return _as_parameters(grads)


class WeftInParts(Weft):
    """weft, with the GPT as it is: layers cut over `tensor` processes, in `partitions` and `replicas` of that."""

    def __init__(
        self, task: Task, tensor: int = 2, partitions: int = 1, replicas: int = 1, **settings: object
    ) -> None:
        super().__init__(task, **settings)
        self.tensor, self.partitions, self.replicas = tensor, partitions, replicas
        self.ranks = tensor * partitions * replicas

    def connect(self) -> None:
        import weft.torch as weft

        counts = {
            "partitions": self.partitions,
            "tensor_parallel_degree": self.tensor,
            "microbatches": self.task.microbatches // self.replicas,
        }
        weft.init(counts | self.settings)

    def step(self, ids: Tensor, targets: Tensor) -> None:
        """This replica's part of the batch."""
        import weft.torch as weft

        own = weft.dp_rank()
        super().step(ids.chunk(self.replicas)[own], targets.chunk(self.replicas)[own])

    def held_parameters(self) -> dict[str, nn.Parameter]:
        from weft.torch.tensor_parallel import full_tensor

        named = super().held_parameters()
        return _as_parameters(
            {name: full_tensor(p, p.grad) for name, p in named.items() if p.grad is not None}
        )


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _as_parameters(grads: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    found = {name: nn.Parameter(torch.empty_like(grad)) for name, grad in grads.items()}
    for name, grad in grads.items():
        found[name].grad = grad
    return found


CONTENDERS: dict[str, Callable[[Any], Contender]] = {
    "one-process": OneProcess,
    "parallelize-module": Parallelized,
    "weft": WeftInParts,
    "weft-sequence": lambda task: WeftInParts(task, sequence_parallel=True),
    "partitions-4": lambda task: WeftInParts(task, tensor=1, partitions=4),
    "tensor-2-partitions-2": lambda task: WeftInParts(task, partitions=2),
    "tensor-2-replicas-2": lambda task: WeftInParts(task, replicas=2),
}
