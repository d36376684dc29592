"""Graphs that are kept where no backward pass comes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.script import Function, Script, dotted, last_name
from weft.check.training import Training

WITHOUT_GRADIENTS = ("no_grad", "inference_mode", "set_grad_enabled")
"""Contexts, decorators and calls of PyTorch after which no graph is kept."""
DIFFERENTIATES = ("grad", "requires_grad_", "jacobian", "hessian", "vjp", "jvp")
"""Calls that need the graph, also where nothing trains."""


def evaluation_with_gradients(script: Script, training: Training) -> Iterator[Finding]:
    """A loop runs a model after `model.eval()` and keeps graphs that no backward pass uses."""
    for call in script.ending("eval"):
        model = dotted(call.func.value) if isinstance(call.func, ast.Attribute) and not call.args else None
        function = script.function_of(call)
        if model is None or _differentiates(function) or _wants_no_gradients(script, model):
            continue
        for loop in ast.walk(function or script.tree):
            if (
                isinstance(loop, ast.For)
                and script.function_of(loop) is function
                and _runs(loop, model)
                and script.comes_after(loop, call)
                and not _trains_again(script, model, call, loop)
                and not without_gradients(script, loop)
            ):
                head = ast.fix_missing_locations(ast.For(loop.target, loop.iter, [], []))
                yield Finding(
                    "evaluation_with_gradients",
                    Grade.SLOW,
                    loop.lineno,
                    f"each batch of this evaluation keeps the graph of {model} for a backward pass that never comes: "
                    "it takes the memory of training",
                    f"with torch.no_grad():\n    {ast.unparse(head).strip()}",
                )


def without_gradients(script: Script, node: ast.AST) -> bool:
    """True if a `with`, a decorator or what calls the function turns gradients off."""
    for each in script.above(node):
        if isinstance(each, ast.With) and any(_turns_off(item.context_expr) for item in each.items):
            return True
        if isinstance(each, Function):
            return any(map(_turns_off, each.decorator_list)) or any(
                isinstance(outer, ast.With) and any(_turns_off(item.context_expr) for item in outer.items)
                for call in script.ending(each.name)
                for outer in script.above(call)
            )
    return False


def _turns_off(context: ast.expr) -> bool:
    return last_name(context.func if isinstance(context, ast.Call) else context) in WITHOUT_GRADIENTS


def _wants_no_gradients(script: Script, model: str) -> bool:
    """True if gradients are off for all of the script, or for the model's parameters."""
    switched = (script.parent.get(call) for call in script.ending(*WITHOUT_GRADIENTS))
    frozen = any(model in map(dotted, ast.walk(call)) for call in script.ending("requires_grad_"))
    flag = any(
        isinstance(each, ast.Assign) and last_name(each.targets[0]) == "requires_grad"
        for each in script.nodes
    )
    return frozen or flag or any(isinstance(each, ast.Expr) for each in switched)


def _differentiates(function: Function | None) -> bool:
    """True if a function needs graphs by itself."""
    calls = (
        [each for each in ast.walk(function) if isinstance(each, ast.Call)] if function is not None else []
    )
    return any(last_name(each.func) in DIFFERENTIATES for each in calls)


def _runs(loop: ast.For, model: str) -> bool:
    """True if a loop calls a model, and has no backward pass."""
    calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)]
    called = any(dotted(each.func) == model for each in calls)
    return called and not any(last_name(each.func) in ("backward", *DIFFERENTIATES) for each in calls)


def _trains_again(script: Script, model: str, call: ast.Call, loop: ast.For) -> bool:
    """True if `model.train()` may stand between `model.eval()` and the loop, or in the loop."""
    return any(
        dotted(each.func) == f"{model}.train"
        and call.lineno < each.lineno <= (loop.end_lineno or loop.lineno)
        for each in script.ending("train")
    )
