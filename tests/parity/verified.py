"""Worker: steps that are compared with one process; right programs, or one that is wrong on purpose.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/verified.py right
    PYTHONPATH=. python -m weft run -n 2 tests/parity/verified.py scaled
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests.training import squares, step_of
from weft.errors import PeerError, VerifyError
from weft.torch.execution.unit_call import unit_call

WIDTH = 8
ROWS = 16
LARGE = "large" in sys.argv
"""Whether weft takes the models for larger than a rank's memory, so that they run by unit."""
outside = types.SimpleNamespace(calls=0, seen=[])
sys.modules["weft_test_outside"] = types.ModuleType("weft_test_outside")
sys.modules["weft_test_outside"].state = outside  # type: ignore[attr-defined]
"""What weft cannot see: no name of this file leads there at run time but by an import."""


def unseen() -> Any:
    """What a library of another file would keep."""
    return __import__("weft_test_outside").state


class Said(logging.Handler):
    """What weft has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Part(nn.Module):
    """A layer with dropout and normalisation; `work` may change what it does."""

    def __init__(self, work: Callable[[nn.Module, Tensor], Tensor] = lambda part, h: h) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.work = work
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, self.dropout(self.norm(torch.tanh(self.linear(x)))))


class Net(nn.Module):
    """Four of them, with glue between."""

    def __init__(
        self, between: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda net, x, h: h, **works: Any
    ):
        super().__init__()
        for name in "abcd":
            setattr(self, name, Part(works[name]) if name in works else Part())
        self.drop = nn.Dropout(0.3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.b(self.drop(self.a(x))))
        h = self.between(self, x, h + F.dropout(h, 0.1) * torch.rand_like(h))
        return self.d(self.drop(self.c(h)) * torch.rand(1).to(h.dtype))


def made(net: nn.Module, **settings: Any) -> nn.Module:
    """The model, its parts spread over the ranks."""
    ranks = settings.setdefault("partitions", weft.pp_size())
    weft.init({"microbatches": 4, "auto_partition": False, "verify": "gradients", **settings})
    model = weft.DistributedModel(net)
    model.oversized = LARGE
    for number, name in enumerate("abcd"):
        weft.set_partition(getattr(net, name), number * ranks // 4)
    return model


train = step_of(squares)


@weft.step(allow_uneven=True)
def uneven(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


@weft.step
def several_returned(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = model(x)
    loss = y.square().mean()
    model.backward(loss)
    return {"loss": loss, "y": y, "largest": y.argmax(1)}


@weft.step
def twice(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x).square().mean()
    model.backward(first)
    (slope,) = torch.autograd.grad(model(x).sum(), [next(model.parameters())], allow_unused=True)
    second = (model(x) - 1).square().mean() + (0.0 if slope is None else slope.square().sum())
    model.backward(second)
    return first + second


@weft.step
def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


two_models = step_of(lambda model, other, x: other(model(x)).square().mean())


def counted(part: nn.Module, h: Tensor) -> Tensor:
    part.calls += 1
    part.last = h
    return h * 2


def from_attribute(net: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return h + net.a.last.detach()


def checkpointed(net: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return checkpoint(lambda one: net.c(one) + net.b(one), h, use_reentrant=False)


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5 + weft.dp_rank()))


def right(said: Said) -> None:
    """Programs that give what one process gives."""
    other: list[nn.Module] = []
    programs: list[tuple[Callable[..., Any], nn.Module, dict[str, Any]]] = [
        (train, Net(), {}),
        (train, Net(), {"verify": "losses"}),
        (train, Net(), {"pipeline": "gpipe"}),
        (several_returned, Net(), {}),
        (evaluated, Net(), {}),
        (twice, Net(), {}),
        (twice, Net(), {"verify": "losses"}),
        (uneven, Net(), {}),
        (train, Net(from_attribute, a=counted), {}),
        (train, Net(checkpointed), {}),
        (train, Net().eval(), {}),
        (train, Net().double(), {}),
        (train, Net().bfloat16(), {}),
    ]
    for number, (step, net, settings) in enumerate(programs):
        said.lines.clear()
        model = made(net, **settings)
        x = data().to(next(net.parameters()).dtype)
        step(model, x[: ROWS - 2] if step is uneven else x)
        _expect(said, f"program {number}", settings.get("verify") != "losses" and step is not evaluated)
        step(model, x[: ROWS - 2] if step is uneven else x)
        assert sum("verify:" in line for line in said.lines) <= 1, "a later step was compared"
    model = made(Net())
    other.append(made(Net()))
    said.lines.clear()
    two_models(model, other[0], data())
    _expect(said, "two models", True)
    said.lines.clear()
    train(made(Net(), verify="off"), data())
    assert not any("verify:" in line for line in said.lines), said.lines


def _expect(said: Said, what: str, gradients: bool) -> None:
    if weft.rank() == 0:
        told = [line for line in said.lines if "verify:" in line]
        assert len(told) == 1, f"{what}: {told}"
        if LARGE and what in ("program 5", "program 6"):  # backward passes in `twice`
            assert "the step looks at gradients, which takes all of the model" in told[0], told
            return
        count = 1 if LARGE else 4
        assert f"gives the losses of one process ({count} microbatches" in told[0], f"{what}: {told}"
        if gradients:
            assert ("not its gradients" if LARGE else "its gradients (") in told[0], f"{what}: {told}"


def _scale(model: nn.Module, name: str, factor: float) -> None:
    """The unit gives more than it should, in the split step alone."""
    call = unit_call(getattr(model.module, name))
    inner, call.inner = call.inner, lambda *args: inner(*args) * factor


def broken(kind: str) -> Callable[[], Any]:
    """A program that is wrong on purpose."""
    if kind == "scaled":
        model = made(Net())
        model.register_post_partition_hook(lambda m, _: weft.pp_rank() and _scale(m, "c", 1.01))
    elif kind == "closure":

        def earlier(net: nn.Module, x: Tensor, h: Tensor) -> Tensor:
            seen = unseen().seen
            seen.append(x)
            return h + seen[-2 if len(seen) > 1 else -1]

        model = made(Net(earlier))
    elif kind == "counter":

        def counter(part: nn.Module, h: Tensor) -> Tensor:
            unseen().calls += 1
            return h * unseen().calls

        model = made(Net(c=counter), verify="losses")
    elif kind == "rank":
        model = made(Net(d=lambda part, h: h + weft.pp_rank()), verify="losses")
    elif kind == "gradient":
        model = made(Net())
        model.register_post_partition_hook(
            lambda m, _: weft.pp_rank() and m.module.c.linear.weight.register_hook(lambda grad: grad * 1.5)
        )
    elif kind == "buffer":

        def stale(part: nn.Module, h: Tensor) -> Tensor:
            if weft.pp_rank():
                part.norm.running_mean.data.zero_()
            return h

        model = made(Net(d=stale), verify="losses")
    else:  # an input of another microbatch

        def other(part: nn.Module, h: Tensor) -> Tensor:
            kept = unseen().seen
            kept.append(h.detach())
            return h + kept[-2] if len(kept) > 1 and weft.pp_rank() else h

        model = made(Net(d=other), verify="losses")
    return lambda: train(model, data())


if __name__ == "__main__":
    torch.set_num_threads(1)
    weft.init({"partitions": int(sys.argv[2]) if len(sys.argv) > 2 else 2, "microbatches": 4})
    torch.manual_seed(2)
    told = Said()
    logging.getLogger("weft").addHandler(told)
    logging.getLogger("weft").setLevel(logging.INFO)
    if sys.argv[1] == "right":
        right(told)
    else:
        run = broken(sys.argv[1])
        try:
            run()
        except (VerifyError, PeerError) as error:
            print(f"found: {error}", flush=True)
        else:
            raise AssertionError("nothing was found")
    print("passed", flush=True)
