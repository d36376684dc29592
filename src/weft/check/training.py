"""The training of a script: its step functions, the loops that run them, and the loaders that feed these loops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from weft.check.script import WEFT, Function, Loop, Script, argument, dotted, keyword, last_name

DEPTH = 3
"""Through so many functions a loop is looked for that calls them."""


@dataclass(frozen=True)
class Step:
    """A function that weft runs for each microbatch.

    Attributes:
        function: Its definition.
        uneven: Whether it takes mini-batches that microbatches do not divide.
        trains: Whether it has a backward pass.
    """

    function: Function
    uneven: bool
    trains: bool


@dataclass(frozen=True)
class Loader:
    """A `DataLoader` that feeds a training loop.

    Attributes:
        call: Where it is made.
        loop: The loop that it feeds.
        steps: Those of weft's that this loop calls.
    """

    call: ast.Call
    loop: Loop
    steps: tuple[Step, ...]

    @property
    def dataset(self) -> ast.expr | None:
        """The dataset it reads; None if it is not given."""
        return argument(self.call, 0, "dataset")

    @property
    def batch_size(self) -> ast.expr | None:
        """Samples of a batch, as an expression."""
        return argument(self.call, 1, "batch_size")

    @property
    def sampler(self) -> ast.expr | None:
        """The sampler, if one is given; without one it reads all samples."""
        return argument(self.call, 3, "sampler") or argument(self.call, 4, "batch_sampler")

    def says(self, name: str) -> bool:
        """True if a keyword is given, as something else than False."""
        value = keyword(self.call, name)
        return value is not None and not (isinstance(value, ast.Constant) and not value.value)

    @property
    def plain(self) -> bool:
        """True if its arguments are all written down."""
        return all(each.arg for each in self.call.keywords) and not any(
            isinstance(each, ast.Starred) for each in self.call.args
        )


class Training:
    """The training of a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.steps = {step.function.name: step for step in self._steps()}
        self.models = {*self._made(f"{WEFT}.DistributedModel")}
        self.optimizers = {*self._made(f"{WEFT}.DistributedOptimizer")}
        self.loops = [*dict.fromkeys(loop for call in self._trains() for loop in self._around(call, DEPTH))]
        self.loaders = [*self._loaders()]
        self.read = self._results()

    def step_of(self, node: ast.AST) -> Step | None:
        """The step function that this is a part of."""
        around = (each.name for each in self.script.above(node) if isinstance(each, Function))
        return next((self.steps[name] for name in around if name in self.steps), None)

    def step_called(self, call: ast.Call) -> Step | None:
        """The step function that a call runs, also as a method."""
        name = last_name(call.func)
        return self.steps.get(name) if dotted(call.func) in (name, f"self.{name}") else None

    def _steps(self) -> Iterator[Step]:
        for function in self.script.functions.values():
            for decorator in function.decorator_list:
                options = decorator if isinstance(decorator, ast.Call) else None
                if self.script.name(options.func if options else decorator) == f"{WEFT}.step":
                    uneven = options is not None and keyword(options, "allow_uneven") is not None
                    trains = any(
                        isinstance(node, ast.Call) and last_name(node.func) == "backward"
                        for node in ast.walk(function)
                    )
                    yield Step(function, uneven, trains)

    def _made(self, maker: str) -> Iterator[str]:
        """The names of what such calls make."""
        for key, values in self.script.assigned.items():
            if any(isinstance(value, ast.Call) and self.script.name(value.func) == maker for value in values):
                yield key

    def _trains(self) -> Iterator[ast.Call]:
        """Calls of training steps, and backward passes outside of them."""
        for call in self.script.calls:
            step = self.step_called(call)
            outside = last_name(call.func) == "backward" and self.step_of(call) is None
            if outside or (step is not None and step.trains):
                yield call

    def _around(self, node: ast.AST, depth: int) -> Iterator[Loop]:
        """The innermost loops that come to a node, also through functions that are called by their names."""
        loop = self.script.loop_of(node)
        if loop is not None:
            yield loop
            return
        function = self.script.function_of(node)
        if function is None or depth == 0 or function.name in self.steps:
            return
        for call in self.script.callers(function):
            yield from self._around(call, depth - 1)

    def _loaders(self) -> Iterator[Loader]:
        made = {}
        for name, values in self.script.assigned.items():
            value = values[0] if len(values) == 1 else None
            if isinstance(value, ast.Call) and last_name(value.func) == "DataLoader":
                made[name] = value
        for loop in self.loops:
            if isinstance(loop, ast.While):
                continue
            steps = tuple(self._steps_in(loop))
            for node in ast.walk(loop.iter):
                if isinstance(node, ast.Call) and last_name(node.func) == "DataLoader":
                    yield Loader(node, loop, steps)
                elif (key := dotted(node)) is not None and (found := self.origin(loop, key) or key) in made:
                    yield Loader(made[found], loop, steps)

    def _steps_in(self, loop: Loop) -> Iterator[Step]:
        for node in ast.walk(loop):
            step = self.step_called(node) if isinstance(node, ast.Call) else None
            if step is not None:
                yield step

    def origin(self, node: ast.AST, key: str) -> str | None:
        """The name of a function's parameter where the function is called, all other names as they are.

        None where it is called in several places, or in none.
        """
        function = self.script.function_of(node)
        names = [] if function is None else [each.arg for each in function.args.args]
        if function is None or key not in names:
            return key
        given = [argument(call, names.index(key), key) for call in self.script.callers(function)]
        return dotted(given[0]) if len(given) == 1 else None

    def _results(self) -> set[tuple[Function | None, str]]:
        """Names that hold tensors which a step has computed, with the function in which they do."""
        found = set()
        for node in self.script.nodes:
            if isinstance(node, ast.Assign) and self._computes(node.value):
                for target in node.targets:
                    names = target.elts if isinstance(target, ast.Tuple) else [target]
                    found |= {(self.script.function_of(node), key) for each in names if (key := dotted(each))}
        for call in self.script.ending("backward"):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            scaled = owner.args[:1] if isinstance(owner, ast.Call) else []
            for each in (owner, *call.args[:1], *scaled):
                key = dotted(each)
                if key and key not in self.models and (each is not owner or not call.args):
                    found.add((self.script.function_of(call), key))
        return found

    def _computes(self, value: ast.expr) -> bool:
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr not in ("reduce_mean", "reduce_sum", "concat", "stack"):
                return False
            value = value.func.value
        return isinstance(value, ast.Call) and self.step_called(value) is not None
