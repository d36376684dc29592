"""The graph of a model that somebody's script makes: traced in one process, without a job.

The script has a function that takes nothing and returns the model and a mini-batch:

    def example():
        model = ...
        batch = torch.randn(32, 3, 224, 224)          # model(batch); a tuple: model(*batch); a dict: model(**batch)
        return model, batch                           # or: model, batch, loss

`loss(result)`, or `loss(result, batch)` if it takes two arguments, gives what the backward pass begins at. Without it
that is the result's `loss`, the result itself if it is one number, or else the sum of the result.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.graph import Graph
from weft.graph import Tensor as Flow
from weft.session.cut import Cut
from weft.torch.delayed_parameters import has_delayed
from weft.torch.execution.thread_settings import rehearsal
from weft.torch.model import DistributedModel
from weft.torch.session.random_streams import Streams
from weft.torch.split.open_modules import graph_of, homes
from weft.torch.split.sharding import with_cuts
from weft.torch.split.unit_tree import Tree
from weft.torch.tensors.mini_batch import prepare
from weft.torch.tensors.pytree import map_tensors, tensors_in
from weft.torch.trace.dry_run import DryRun
from weft.torch.trace.times import Clock
from weft.torch.trace.trace import trace
from weft.torch.trace.without_values import AsWithValues, on_meta
from weft.untrusted import shown_path, translated

UNITS = 64
"""Down to about how many units a model is opened."""


@dataclass(frozen=True)
class Example:
    """A model and what it is called with.

    Attributes:
        model: Any module.
        batch: A tensor, a tuple or list of arguments, or a dict of them.
        loss: From the result (and the batch, if it takes two arguments) to one number; see the module.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """That of the model's first parameter."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def result(self, batch: Any) -> Any:
        """The model's result for a batch."""
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch)

    def start(self, result: Any, batch: Any) -> Tensor | None:
        """The tensor at which the backward pass begins; None if nothing of the result needs a gradient."""
        if self.loss is not None:
            found: Any = self.loss(result, batch) if _takes_two(self.loss) else self.loss(result)
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise UsageError(
                    f"the loss function returned {_named(found)}: it must return a tensor of one number"
                )
            return found
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return found
        parts = [tensor.float().sum() for tensor in tensors_in(result) if tensor.requires_grad]
        return torch.stack(parts).sum() if parts else None


def load_example(path: Path, name: str = "example") -> Example:
    """Import a script and call its function `name`.

    Raises:
        UsageError: If there is no such file or function, it fails (`__cause__` is its error then), or it returns
            something else.
    """
    return checked_example(run_example(path, name), path, name)


def run_example(path: Path, name: str = "example") -> Any:
    """Import a script and call its function `name`; what that returns, whatever it is.

    Raises:
        UsageError: If there is no such file or function, or it fails (`__cause__` is its error then).
    """
    function = getattr(_imported(path), name, None)
    if not callable(function):
        raise UsageError(
            f"{path} has no function {name}: write one that returns the model and a mini-batch, "
            f"def {name}(): return model, batch"
        )
    try:
        return function()
    except Exception as error:
        raise UsageError(f"{path}: {name}() failed: {_line(error)}") from error


def checked_example(found: Any, path: Path, name: str = "example") -> Example:
    """The example that a script's function has returned.

    Raises:
        UsageError: It is none.
    """
    fault = _fault(found)
    if fault:
        raise UsageError(f"{path}: {name}() returned {fault}: return model, batch or model, batch, loss")
    model, batch, *loss = found
    return Example(model.module if isinstance(model, DistributedModel) else model, batch, *loss)


def _imported(path: Path) -> Any:
    with translated(f'"{shown_path(path)}" is no script', UsageError):
        if not path.is_file():
            raise UsageError(
                f"there is no file {shown_path(path)}: give a script and its function, for example "
                "train.py:example"
            )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a script of Python: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f'{path} cannot be imported: {_line(error)}; what trains belongs under if __name__ == "__main__"'
        ) from error
    return module


def _fault(found: Any) -> str:
    """The fault of an example's result; empty if there is none."""
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        count = f", of length {len(found)}" if isinstance(found, (tuple, list)) else ""
        return f"{_named(found)}{count}"
    if not isinstance(found[0], nn.Module):
        return f"{_named(found[0])} in place of the model"
    if not isinstance(found[1], (Tensor, tuple, list, Mapping)):
        return f"{_named(found[1])} in place of the mini-batch (a tensor, a tuple or a dict)"
    if len(found) == 3 and not callable(found[2]):
        return f"{_named(found[2])} in place of the loss function"
    return ""


def traced_graph(example: Example, microbatches: int = 1, units: int = UNITS) -> Graph:
    """The graph of an example's model, for one microbatch; the model stays as it was.

    Args:
        example: The model and a mini-batch.
        microbatches: Into how many microbatches the mini-batch is cut; the first one is traced.
        units: Modules are opened, the most expensive first, until there are so many units.

    A model on the meta device is not run: its costs are estimated.

    Raises:
        SplitError: If the mini-batch cannot be cut.
        UsageError: If the model fails (`__cause__` is its error then) or holds no parameters.
    """
    model, device = example.model, example.device
    batch = first_microbatch(example, microbatches)
    meta = has_delayed(model)
    if meta:
        device = torch.device("meta")
        batch = map_tensors(batch, lambda t: t.to("meta"), attributes=True)
    clock, dry = Clock() if meta else None, DryRun([model], Streams(device), example.loss, batch)

    def run() -> None:
        batch = dry.arguments()
        result = example.result(batch)
        start = example.start(result, batch)
        rehearsing = rehearsal()
        if start is not None and start.requires_grad and rehearsing is not None:
            rehearsing.backward([start], [torch.ones_like(start)])

    try:
        with ExitStack() as stack:
            if clock is not None:
                stack.enter_context(on_meta(model))
                stack.enter_context(AsWithValues())
                stack.enter_context(clock)
            traced = trace(model, run, device, dry.snapshot(), clock, split=not meta)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the model failed on its mini-batch: {_line(error)}") from error
    tree = Tree(model, traced)
    pieces = [piece for piece in tree.pieces(opened(tree, units)) if not piece.floating]
    if not pieces:
        raise UsageError(f"{type(model).__name__} holds no parameters, so there is nothing to place")
    own = graph_of(pieces).units
    if not meta:
        with dry.forward(run) as once:
            own = with_cuts(own, model, once)
    whole = [replace(unit, name=unit.name or type(model).__name__) for unit in own]
    names = [unit.name for unit in whole]
    return Graph(
        whole,
        [
            Flow(names[source], tuple(names[user] for user in users), size)
            for source, users, size in traced.operations.flows(homes(tree, pieces))
        ],
    )


def first_microbatch(given: Example, microbatches: int) -> Any:
    """The first of so many microbatches, on the model's device.

    Raises:
        SplitError: If the mini-batch cannot be cut.
    """

    def example(batch: Any) -> None:
        """Named in errors."""

    batch = given.batch
    if microbatches > 1:
        batch = prepare(example, (batch,), {}, Cut(), microbatches).slice(0)[0][0]
    return map_tensors(batch, lambda tensor: tensor.to(given.device), attributes=True)


def opened(tree: Tree, units: int) -> set[str]:
    """The modules to open for at least so many units, if there are; the most expensive ones."""
    found: set[str] = set()
    while True:
        pieces = [piece for piece in tree.pieces(found) if not piece.floating]
        closed = [
            (piece.unit.time_ms, piece.name)
            for piece in pieces
            if tree.openable(piece.name) and not tree.writes(piece.name)
        ]
        if len(pieces) >= units or not closed:
            return found
        found.add(max(closed)[1])


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in parameters) == 2


def _named(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of the shape {list(thing.shape)}"
    return "nothing" if thing is None else f"a value of the type {type(thing).__name__}"


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
