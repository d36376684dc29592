"""Who can run in a comparison on the GPT: each trains it on the same mini-batch, in its own way."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTConfig, GPTPart, next_token_loss
from benchmarks.turns.contender import Contender
from weft.schedule import CHUNKS

SEED = 20
SMALL = GPTConfig(blocks=4, width=32, heads=2, context=16, vocabulary=64)
"""Only to see that everything runs."""
AUTO_SETTLED = 22
"""Steps after which `auto` has compared its prediction with what was measured, and replans no more."""


@dataclass(frozen=True)
class Task:
    config: GPTConfig = GPTConfig()
    batch: int = 16
    microbatches: int = 8

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


class OneProcess(Contender):
    """The yardstick: one process of one thread accumulates the microbatches' gradients."""

    ranks = 1

    def connect(self) -> None:
        """A single process has nobody to find."""

    def build(self) -> None:
        self.model = self.task.model()

    def step(self, ids: Tensor, targets: Tensor) -> None:
        count = self.task.microbatches
        self.model.zero_grad()
        for part, wanted in zip(ids.chunk(count), targets.chunk(count), strict=True):
            (next_token_loss(self.model(part), wanted) / count).backward()

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class Peer(Contender):
    """`torch.distributed.pipelining`, cut by hand into stages of equally many blocks."""

    schedule_name: str
    stages_per_rank = 1

    def stages_of(self, rank: int) -> list[int]:
        """Stages in a loop: rank 0 has 0, 2, ..., rank 1 has 1, 3, ..."""
        return [rank + self.ranks * turn for turn in range(self.stages_per_rank)]

    def connect(self) -> None:
        importlib.import_module("torch.distributed.pipelining")
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))

    def build(self) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        model = self.task.model()
        stage_count = self.ranks * self.stages_per_rank
        blocks = self.task.config.blocks // stage_count
        mine = self.stages_of(dist.get_rank())
        self.parts = [GPTPart(model, range(stage * blocks, (stage + 1) * blocks)) for stage in mine]
        stages = [
            PipelineStage(part, index, stage_count, torch.device("cpu"))
            for part, index in zip(self.parts, mine, strict=True)
        ]
        schedule_class = schedules.get_schedule_class(self.schedule_name)
        given = stages[0] if issubclass(schedule_class, schedules.PipelineScheduleSingle) else stages
        self.schedule = schedule_class(given, self.task.microbatches, loss_fn=next_token_loss)
        self.has_first = 0 in mine
        self.has_last = stage_count - 1 in mine

    def step(self, ids: Tensor, targets: Tensor) -> None:
        for part in self.parts:
            part.zero_grad()
        inputs = (ids,) if self.has_first else ()
        given = {"target": targets, "losses": []} if self.has_last else {}
        self.schedule.step(*inputs, return_outputs=False, **given)

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for part in self.parts for name, value in part.named_parameters()}


class GPipe(Peer):
    schedule_name = "GPipe"


class OneForwardOneBackward(Peer):
    schedule_name = "1F1B"


class Interleaved(Peer):
    schedule_name = "Interleaved1F1B"
    stages_per_rank = 2


class VShaped(Peer):
    """Rank 0 has the first and the last stage, rank 1 what is between."""

    stages_per_rank = 2

    def stages_of(self, rank: int) -> list[int]:
        return [rank, 2 * self.ranks - 1 - rank]


class ZeroBubbleV(VShaped):
    schedule_name = "ZBVZeroBubble"


class DualPipeV(VShaped):
    schedule_name = "DualPipeV"


class Weft(Contender):
    """weft splits the whole, unmodified model by itself."""

    def __init__(self, task: Task, **settings: object) -> None:
        super().__init__(task)
        self.settings = {"optimize": "speed", "memory_weight": 0.0, **settings}
        if self.settings.get("pipeline") == "auto":
            self.warm_up = AUTO_SETTLED

    def connect(self) -> None:
        import weft.torch as weft

        counts = {"partitions": self.ranks, "microbatches": self.task.microbatches}
        weft.init(counts | self.settings)

    def build(self) -> None:
        import weft.torch as weft

        self.model = weft.DistributedModel(self.task.model())

        @weft.step
        def train_step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
            loss = next_token_loss(model(ids), targets)
            model.backward(loss)
            return loss

        self.train_step = train_step

    def step(self, ids: Tensor, targets: Tensor) -> None:
        self.model.zero_grad()
        self.train_step(self.model, ids, targets)

    def held_parameters(self) -> dict[str, nn.Parameter]:
        held = self.model.local_named_parameters()
        return {name.removeprefix("module."): value for name, value in held}

    def plan(self) -> str:
        import weft.torch as weft

        return str(weft.partition_report(self.model))

    def close(self) -> None:
        import weft.torch as weft

        weft.shutdown()


class WeftByMKL(Weft):
    """weft without products by oneDNN: what of the result is the pipeline's own."""

    def connect(self) -> None:
        torch.backends.mkldnn.set_flags(_enabled=False)
        super().connect()


class WeftAlone(Weft):
    """weft with nothing to split."""

    ranks = 1


def weft_with(**settings: object) -> Callable[[Task], Contender]:
    return lambda task: Weft(task, **settings)


PEERS: dict[str, Callable[[Task], Contender]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "interleaved1f1b": Interleaved,
    "zbv": ZeroBubbleV,
    "dualpipev": DualPipeV,
}

CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    "one-process": OneProcess,
    "one-process-again": OneProcess,
    "weft-alone": WeftAlone,
    **PEERS,
    "weft": weft_with(pipeline="1f1b"),
    "weft-memory": weft_with(pipeline="1f1b", optimize="memory", memory_weight=0.8),
    **{f"weft-{name}": weft_with(pipeline=name) for name in (*CHUNKS, "auto")},
    "weft-auto-mkl": lambda task: WeftByMKL(task, pipeline="auto"),
}
