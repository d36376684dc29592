"""A unit's call goes quickly where it is as most are. It does then what the plain way does, to the last message."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.runtime.executor import Executor, Order
from weft.runtime.microbatch import Microbatch
from weft.schedule.schedule import Action
from weft.torch.execution.glue import Glue
from weft.torch.execution.gradients import run_backward
from weft.torch.execution.program import Program
from weft.torch.execution.unit_call import FLOATING, UNUSUAL, UnitCall, attach
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.transport.channel import Message
from weft.transport.loopback import LoopbackChannel, connect

CPU = torch.device("cpu")
WIDTH = 3
STEPS = 3
CALLS = 12
LIMIT_S = 60


class Pair(nn.Linear):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x * 2


class Same(nn.Linear):
    """Returns what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reads(nn.Linear):
    """Reads a value, which may be another one next time: the others are told its shapes each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.sum().item() > 0 else -1)


# None draws random numbers: the two ranks are threads, and would draw from one stream.
UNITS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "first": (0, lambda: nn.Linear(WIDTH, WIDTH)),
    "second": (1, lambda: nn.Linear(WIDTH, WIDTH)),
    "floating": (FLOATING, nn.Tanh),
    "stateful": (0, lambda: nn.BatchNorm1d(WIDTH)),
    "pair": (1, lambda: Pair(WIDTH, WIDTH)),
    "same": (0, lambda: Same(WIDTH, WIDTH)),
    "reads": (1, lambda: Reads(WIDTH, WIDTH)),
}


def calls_of(seed: int) -> list[tuple[str, int, bool, bool]]:
    """Units by name, how many tensors back their argument lies, whether with gradients, whether it is given by name."""
    chance = random.Random(seed)
    return [
        (chance.choice([*UNITS, "first", "second", "floating"]), chance.randrange(3), chance.random() < 0.8,
         chance.random() < 0.1)
        for _ in range(CALLS)
    ]  # fmt: skip


class Rank:
    """One of two ranks, which makes the calls, and notes what can be seen of them."""

    def __init__(self, channel: LoopbackChannel) -> None:
        torch.manual_seed(0)
        self.rank = channel.rank
        self.seen: list[Any] = []
        self.channel = channel
        self.pipeline = Pipeline(self.rank, 2, CPU, channel, Streams(CPU))
        self.units = {name: make() for name, (_, make) in UNITS.items()}
        for name, (owner, _) in UNITS.items():
            attach(self.units[name], name, owner, self.pipeline)
            for parameter in self.units[name].parameters():
                parameter._weft_owner = owner  # type: ignore[attr-defined]
        send = channel.send

        def note(peer: int, message: Message) -> None:
            payload = message.payload
            data = payload.tolist() if isinstance(payload, Tensor) else payload
            self.seen.append((peer, message.key, message.text, message.flag, data))
            send(peer, message)

        channel.send = note  # type: ignore[method-assign]

    def train(self, calls: list[tuple[str, int, bool, bool]]) -> None:
        executor = Executor(self.channel.mailbox, self.rank, LIMIT_S / 2)
        try:
            for step in range(STEPS):
                self.pipeline.logs.clear()
                order = Order.of([Action(self.rank, "F", 0), Action(self.rank, "B", 0)], 1)
                executor.run([lambda microbatch, step=step: self._step(microbatch, step, calls)], order)
                for name, unit in self.units.items():
                    self.seen += [
                        (name, None if p.grad is None else p.grad.tolist()) for p in unit.parameters()
                    ]
        finally:
            executor.close()

    def _step(self, microbatch: Microbatch, step: int, calls: list[tuple[str, int, bool, bool]]) -> None:
        program = Program(self.pipeline, microbatch, step, 7, 1.0)
        with Glue(program) as glue:
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
            everywhere = x.clone().requires_grad_()
            made = [everywhere, self.units["first"](x)]
            for name, back, with_grad, named in calls:
                given = made[-1 - back % len(made)]
                with torch.set_grad_enabled(with_grad):
                    result = (
                        self.units[name](input=given)
                        if named and name == "first"
                        else self.units[name](given)
                    )
                with glue.lifted():
                    for tensor in result if isinstance(result, tuple) else (result,):
                        self._note(program, name, tensor)
                        made.append(tensor)
            loss = torch.stack([tensor.square().mean() for tensor in made]).sum()
            with glue.lifted():
                run_backward(program, loss, None)
        assert everywhere.grad is not None
        self.seen.append(everywhere.grad.tolist())
        self.seen.append(dict(microbatch.times))
        self.seen.append([[getattr(part, "name", part) for part in key] for key in program.log])
        program.close()

    def _note(self, program: Program, name: str, tensor: Tensor) -> None:
        value = program.value_of(tensor)
        place = None if value is None else (value.number, value.owner)
        data = (
            value.data(tensor).tolist() if value is not None and value.owner == self.rank else tensor.device
        )
        self.seen.append((name, place, tensor.shape, tensor.requires_grad, data))


def run(seed: int) -> list[list[Any]]:
    """What each of two ranks has seen."""
    ranks = [Rank(channel) for channel in connect(2)]
    errors: list[BaseException] = []

    def train(rank: Rank) -> None:
        try:
            rank.train(calls_of(seed))
        except BaseException as error:
            errors.append(error)
            rank.channel.abort(str(error))

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return [rank.seen for rank in ranks]


@pytest.mark.parametrize("seed", range(12))
def test_a_quick_call_does_what_the_plain_way_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly = UnitCall._call_quickly
    went = []

    def counted(self: UnitCall, *given: Any) -> Any:
        result = quickly(self, *given)
        went.append(result is not UNUSUAL)
        return result

    monkeypatch.setattr(UnitCall, "_call_quickly", counted)
    quick = run(seed)
    assert any(went) and not all(went)
    monkeypatch.setattr(UnitCall, "_call_quickly", lambda *given: UNUSUAL)
    plain = run(seed)
    for mine, theirs in zip(quick, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == other
