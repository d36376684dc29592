"""A check that weft works with this PyTorch: by name with every version, and by trying with one that nobody has tested.

    private names that weft needs are missing    `weft.init` refuses, and says which
    ... that it can do without                   the log says what is different
    a version outside of TESTED                  two ranks in two threads of this process train tiny models for a step;
                                                 what goes wrong there is refused where a model uses it

The models have one habit each that weft takes over from PyTorch. What they give is compared with plain PyTorch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from weft.errors import ConfigError, PeerError
from weft.runtime.executor import Executor
from weft.runtime.microbatch import Microbatch
from weft.schedule.order import Order
from weft.schedule.schedule import Action
from weft.torch.backward import weight_gradients
from weft.torch.calls.placeholders import placeholder
from weft.torch.execution.entry_points import replace_checkpoint
from weft.torch.execution.glue import Glue, running
from weft.torch.execution.gradients import run_backward
from weft.torch.execution.program import Program
from weft.torch.execution.thread_settings import rehearsal
from weft.torch.execution.unit_call import attach
from weft.torch.interceptions import install
from weft.torch.pytorch import private
from weft.torch.pytorch.private import REFUSED
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.trace import trace
from weft.transport import private_c10d
from weft.transport.loopback import LoopbackChannel, connect

log = logging.getLogger("weft")

TESTED = "2.11", "2.15"
"""The oldest and the newest PyTorch that all tests have passed on; see docs/assumptions.md."""
LIMIT_S = 10.0
CPU = torch.device("cpu")

Run = Callable[[Any, Tensor], Tensor]


class _Net(nn.Module):
    """One module for each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _scaled(x: Tensor) -> Tensor:
    return x * 3 + 1


def _plain(net: Any, x: Tensor) -> Tensor:
    return x + net.second(net.first(x).tanh())


def _function(net: Any, x: Tensor) -> Tensor:
    doubled: Tensor = _Double.apply(net.first(x))
    return net.second(doubled)


def _checkpoint(reentrant: bool) -> Run:
    """A run that shows whether weft takes activation checkpoints over.

    The run has no gradients: PyTorch's own checkpoint imports the compiler for these, which takes seconds.
    """
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    if checkpoint.__module__ == torch.utils.checkpoint.__name__:
        checkpoint = inspect.unwrap(checkpoint)  # the decorator around it imports the compiler, too

    def run(net: Any, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            glue = running()
            if glue is not None and not glue.program.checkpointing:
                raise NotImplementedError("weft cannot take it over")
            return _plain(net, x)

        with torch.no_grad():
            return inside(x) if running() is None else checkpoint(inside, x, use_reentrant=reentrant)

    return run


def _scripted() -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated on some versions of Python
        scripted = torch.jit.script(_scaled)
    return lambda net, x: net.second(scripted(net.first(x)))


def _in_place(net: Any, x: Tensor) -> Tensor:
    x = net.first(x)
    x[:, 0] = x[:, 1] * 2
    x.mul_(3)
    return net.second(x)


def _hook(net: Any, x: Tensor) -> Tensor:
    handle = net.first.register_forward_hook(lambda module, inputs, result: result * 2)
    try:
        return net.second(net.first(x))
    finally:
        handle.remove()


def _read(net: Any, x: Tensor) -> Tensor:
    x = net.first(x)
    return net.second(x * 2 if x.sum().item() > 0 else x * 3)


MODULES, APART, TRACE = "calls of modules", "gradients of weights apart", "the trace of the first step"
PARTS: dict[str, Callable[[], Run]] = {
    MODULES: lambda: _plain,
    private.FUNCTION: lambda: _function,
    private.CHECKPOINT: lambda: _checkpoint(reentrant=False),
    private.REENTRANT: lambda: _checkpoint(reentrant=True),
    private.SCRIPTED: _scripted,
    private.IN_PLACE: lambda: _in_place,
    private.HOOKS: lambda: _hook,
    private.READS: lambda: _read,
    APART: lambda: _plain,
}


def check(first: bool) -> None:
    """Refuse a PyTorch that weft cannot work with. ``first``: this rank logs what is different.

    Raises:
        ConfigError: Names that weft needs are missing, or modules cannot be split over ranks.
    """
    needed, spared = private_c10d.missing({**private_c10d.NAMES, **private.NAMES})
    if needed:
        raise ConfigError(f"PyTorch {torch.__version__} has no {'; no '.join(needed)}: {remedy()}")
    for line in spared if first else ():
        log.info("PyTorch %s has no %s", torch.__version__, line)
    if release_of(TESTED[0]) <= release_of(torch.__version__) <= release_of(TESTED[1]) or _checked:
        return
    faults = try_out()
    if private.CHECKPOINT in faults:
        replace_checkpoint()
        faults = try_out()
    _checked.append(True)
    for part in (MODULES, TRACE):
        if part in faults:
            raise ConfigError(
                f"PyTorch {torch.__version__} does not work with this version of weft ({part}: {faults[part]}): "
                f"{remedy()}"
            )
    if APART in faults:
        weight_gradients.KNOWN.clear()
        del faults[APART]
    for part, fault in faults.items():
        REFUSED[part] = f"PyTorch {torch.__version__} ({fault}): {remedy()}"
    if first:
        result = (
            f"what fails is refused: {', '.join(faults)}" if faults else "a short check found nothing wrong"
        )
        log.warning(
            "PyTorch %s has not been tested with this version of weft (%s to %s have); %s",
            torch.__version__, *TESTED, result,
        )  # fmt: skip


_checked: list[bool] = []


def release_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> release_of("2.13.0+cpu")
    (2, 13)
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def remedy() -> str:
    """The advice to a user whose PyTorch does not work with weft."""
    major, minor = release_of(TESTED[1])
    return (
        f'install one that was tested: pip install "torch>={TESTED[0]},<{major}.{minor + 1}", or a newer weft'
    )


def try_out() -> dict[str, str]:
    """The faults, by the part of PyTorch that was tried; the process's random states stay as they were."""
    install()
    streams = Streams(CPU)
    with Snapshot([], streams).restored(watch=False):
        torch.manual_seed(0)
        net, x = _Net(), torch.randn(2, 3)
        found = {part: _fault(net, x, run(), part == APART) for part, run in PARTS.items()}
        found[TRACE] = _trace_fault(net, x, streams)
    return {part: fault for part, fault in found.items() if fault}


def _fault(net: _Net, x: Tensor, run: Run, apart: bool) -> str:
    """The difference between the step of two ranks and that of plain PyTorch; empty if they are equal."""
    alone = copy.deepcopy(net)
    loss = run(alone, x).square().mean()
    if loss.requires_grad:
        loss.backward()
    expected = _results(loss, dict(alone.named_parameters()))
    try:
        got = _split(net, x, run, frozenset({0, 1}) if apart else frozenset())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = [
        name
        for name in {**expected, **got}
        if name not in got
        or name not in expected
        or not torch.allclose(got[name], expected[name], 1e-4, 1e-5)
    ]
    return f"other than plain PyTorch's: {', '.join(wrong)}" if wrong else ""


def _results(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The loss and all present gradients, by name."""
    gradients = {f"the gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    return {"the loss": loss.detach(), **gradients}


def _trace_fault(net: _Net, x: Tensor, streams: Streams) -> str:
    def step() -> None:
        loss = _plain(net, x).square().mean()
        rehearsing = rehearsal()
        assert rehearsing is not None
        rehearsing.backward([loss], [torch.ones_like(loss)])

    try:
        traced = trace(
            net, step, torch.device("meta"), Snapshot([net], streams)
        )  # meta: no huge pages are needed
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(traced.records[name].calls for name in ("first", "second")) else "modules were not seen"


def _split(net: _Net, x: Tensor, run: Run, splits: frozenset[int]) -> dict[str, Tensor]:
    """The loss and the gradients by name, after a step of two ranks."""
    found: dict[str, Tensor] = {}
    errors: list[BaseException] = []
    channels = connect(2)
    threads = [
        threading.Thread(
            target=_rank, args=(copy.deepcopy(net), x.clone(), run, splits, channel, found, errors)
        )
        for channel in channels
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    first = [error for error in errors if not isinstance(error, PeerError)] or errors
    if first:
        raise first[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("two ranks waited for each other")
    return found


def _rank(
    net: _Net, x: Tensor, run: Run, splits: frozenset[int], channel: LoopbackChannel, found: dict[str, Tensor],
    errors: list[BaseException],
) -> None:  # fmt: skip
    """Run one rank's step, and note its results or its error."""
    rank = channel.rank
    pipeline = Pipeline(rank, 2, CPU, channel, Streams(CPU))  # type: ignore[arg-type]
    losses: list[float] = []
    own = {}
    for at, (unit, module) in enumerate(net.named_children()):
        attach(module, unit, at, pipeline)
        for name, parameter in module.named_parameters():
            parameter._weft_owner = at  # type: ignore[attr-defined]
            if at == rank:
                own[f"{unit}.{name}"] = parameter
            else:
                placeholder(parameter, at, f"{unit}.{name}")

    def body(microbatch: Microbatch) -> None:
        program = Program(pipeline, microbatch, 1, 0, 1.0, splits)
        with Glue(program) as glue:
            loss = run(net, x).square().mean()
            losses.append(loss.item())
            if loss.requires_grad:
                with glue.lifted():
                    run_backward(program, loss, None)
        program.close()

    executor = Executor(channel.mailbox, rank, LIMIT_S / 2)
    later = [Action(rank, "I", 0), Action(rank, "W", 0)] if splits else [Action(rank, "B", 0)]
    try:
        executor.run([body], Order.of([Action(rank, "F", 0), *later], 1))
        found.update(_results(torch.tensor(losses[0]), own))
    except BaseException as error:
        errors.append(error)
        channel.abort(f"{type(error).__name__}: {error}")
    finally:
        executor.close()
