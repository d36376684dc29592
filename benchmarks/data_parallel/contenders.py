"""Who can run in a comparison of data parallelism: each trains the GPT on its own part of the mini-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from benchmarks.turns.contender import Contender

SEED = 20
SMALL = GPTConfig(blocks=2, width=32, heads=2, context=16, vocabulary=64)
"""Only to see that everything runs."""


@dataclass(frozen=True)
class Task:
    """``batch`` is that of all ``ranks`` together."""

    ranks: int = 2
    batch: int = 8
    config: GPTConfig = GPTConfig()

    def mini_batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.batch, self.config.context + 1)
        ids = torch.randint(self.config.vocabulary, shape, generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def model(self) -> GPT:
        torch.manual_seed(SEED)
        return GPT(self.config)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(**{**fields, "config": GPTConfig(**fields["config"])})


class DataParallel(Contender):
    """What all have alike: this rank's rows, and the gradients under the model's own names."""

    net: GPT

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.ranks = task.ranks

    def part(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.ranks)[dist.get_rank()]

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())


class DDP(DataParallel):
    """PyTorch's DDP over gloo."""

    backend = "gloo"
    options: dict[str, Any] = {}

    def connect(self) -> None:
        dist.init_process_group(self.backend, timeout=timedelta(seconds=300))

    def build(self) -> None:
        self.net = self.task.model()
        self.model = nn.parallel.DistributedDataParallel(self.net, **self.options)

    def step(self, ids: Tensor, targets: Tensor) -> None:
        self.model.zero_grad()
        next_token_loss(self.model(self.part(ids)), self.part(targets)).backward()


class DDPView(DDP):
    """The same, gradients as views into the buckets."""

    options = {"gradient_as_bucket_view": True}


class Backend(DDP):
    """An unchanged script over weft's backend."""

    backend = "weft"

    def connect(self) -> None:
        import weft.torch.data_parallel  # noqa: F401

        super().connect()


class Shared(DDP):
    """PyTorch's DDP with weft's hook."""

    def build(self) -> None:
        from weft.torch.data_parallel import hook

        super().build()
        self.model.register_comm_hook(None, hook(algorithm="shared"))


class Weft(DataParallel):
    """weft's own reducer, one partition."""

    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}

    def connect(self) -> None:
        import weft.torch as weft

        weft.init(self.settings)

    def build(self) -> None:
        import weft.torch as weft

        self.net = self.task.model()
        self.model = weft.DistributedModel(self.net, **self.options)

        @weft.step
        def train_step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
            loss = next_token_loss(model(ids), targets)
            model.backward(loss)
            return loss

        self.train_step = train_step

    def step(self, ids: Tensor, targets: Tensor) -> None:
        self.model.zero_grad()
        self.train_step(self.model, self.part(ids), self.part(targets))

    def close(self) -> None:
        import weft.torch as weft

        weft.shutdown()


class WeftDirect(Weft):
    """The same over gloo's all-reduce."""

    settings = {"all_reduce": "direct"}


class WeftView(Weft):
    """The same, gradients as views into the buckets."""

    options = {"gradient_as_bucket_view": True}


class WeftAtEnd(Weft):
    """The same, buckets leave at the end of the step."""

    options = {"overlapping_allreduce": False}


CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    "ddp": DDP,
    "ddp-view": DDPView,
    "ddp-weft": Backend,
    "ddp-shared": Shared,
    "weft": Weft,
    "weft-direct": WeftDirect,
    "weft-view": WeftView,
    "weft-at-end": WeftAtEnd,
}
