"""Who runs in the comparison of splits: one process, equally many blocks by hand, weft's own split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from benchmarks.balance.by_hand import equal_blocks
from benchmarks.balance.models import MODELS, Inputs, arguments, loss
from benchmarks.turns.contender import Contender


@dataclass(frozen=True)
class Task:
    """One of `MODELS`, and the schedule that both splits run."""

    model: str
    pipeline: str = "1f1b"
    microbatches: int = 8
    small: bool = False

    def mini_batch(self) -> tuple[Inputs]:
        return (MODELS[self.model].inputs(self.small),)

    def network(self) -> nn.Module:
        return MODELS[self.model].build(self.small)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Task:
        return cls(**json.loads(text))


class OneProcess(Contender):
    """The yardstick: one process of one thread accumulates the microbatches' gradients."""

    ranks = 1

    def connect(self) -> None:
        """A single process has nobody to find."""

    def build(self) -> None:
        self.model = self.task.network()

    def step(self, inputs: Inputs) -> None:
        count = self.task.microbatches
        self.model.zero_grad()
        cut = {name: tensor.chunk(count) for name, tensor in inputs.items()}
        for index in range(count):
            part = {name: slices[index] for name, slices in cut.items()}
            (loss(self.model(**arguments(part)), part) / count).backward()

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class Own(Contender):
    """weft splits by itself."""

    by_hand = False

    def connect(self) -> None:
        import weft.torch as weft

        weft.init(
            {
                "partitions": self.ranks,
                "microbatches": self.task.microbatches,
                "pipeline": self.task.pipeline,
                "optimize": "speed",
                "memory_weight": 0.0,
                "auto_partition": not self.by_hand,
                "default_partition": 0,
            }
        )

    def build(self) -> None:
        import weft.torch as weft

        network = self.task.network()
        if self.by_hand:
            places = equal_blocks(network, MODELS[self.task.model].blocks, self.ranks)
            for name, at in places.items():
                weft.set_partition(network.get_submodule(name), at)
        self.model = weft.DistributedModel(network)

        @weft.step
        def train_step(model: nn.Module, inputs: Inputs) -> Tensor:
            found = loss(model(**arguments(inputs)), inputs)
            model.backward(found)
            return found

        self.train_step = train_step

    def step(self, inputs: Inputs) -> None:
        self.model.zero_grad()
        self.train_step(self.model, inputs)

    def held_parameters(self) -> dict[str, nn.Parameter]:
        held = self.model.local_named_parameters()
        return {name.removeprefix("module."): value for name, value in held}

    def plan(self) -> str:
        """The parameters on the first of the two ranks, a line each."""
        return "\n".join(sorted(self.held_parameters()))

    def close(self) -> None:
        import weft.torch as weft

        weft.shutdown()


class Equal(Own):
    """Equally many blocks on each process."""

    by_hand = True


CONTENDERS: dict[str, Callable[[Task], Contender]] = {"one-process": OneProcess, "equal": Equal, "weft": Own}
