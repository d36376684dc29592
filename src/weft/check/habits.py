"""Habits of loops that train: things that are done each step, and seldom have to be."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.reads import counter_of, each_time, statement_of
from weft.check.script import Script, dotted
from weft.check.training import Training


def graph_kept(script: Script, training: Training) -> Iterator[Finding]:
    """Losses are summed with their graphs, in a loop with a backward pass of PyTorch's own."""
    backward = {
        (script.function_of(call), dotted(call.func.value))
        for call in script.ending("backward")
        if isinstance(call.func, ast.Attribute) and not call.args and training.step_of(call) is None
    }
    for loop in training.loops:
        for node in ast.walk(loop):
            if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
                continue
            total, value = dotted(node.target), dotted(node.value)
            function = script.function_of(node)
            if value is None or (function, value) not in backward or (function, total) in backward:
                continue
            yield Finding(
                "graph_kept",
                Grade.SLOW,
                node.lineno,
                f"{total} keeps the graph of {value} of every step, so memory grows from step to step",
                f"{total} += {value}.detach()",
            )


def saved_each_step(script: Script, training: Training) -> Iterator[Finding]:
    """The loop writes a file in every turn."""
    calls = script.named("torch.save")
    for loop in training.loops:
        for call in calls:
            if each_time(script, call, loop):
                yield Finding(
                    "saved_each_step",
                    Grade.SLOW,
                    call.lineno,
                    "every step waits for the disk, and for the device whose values are written",
                    f"if {counter_of(loop)} % 1000 == 0: {ast.unparse(statement_of(script, call))}",
                )


def cache_emptied_each_step(script: Script, training: Training) -> Iterator[Finding]:
    """The loop gives the GPU's memory back in every turn."""
    calls = script.named("torch.cuda.empty_cache")
    for loop in training.loops:
        for call in calls:
            if each_time(script, call, loop):
                yield Finding(
                    "cache_emptied_each_step",
                    Grade.SLOW,
                    call.lineno,
                    "every step waits for the GPU here, and the next one asks the driver for the same memory again",
                    f"# leave out {ast.unparse(call)}: PyTorch uses again what is free",
                )
