"""Checks of calls that all ranks have to make and one makes alone, and of those that one should make and all make."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.ranks import Alone, alone, comes_alone, ranks_in
from weft.check.reads import COLLECTIVES, WEFT_COLLECTIVES
from weft.check.script import WEFT, Script, argument, dotted, keyword, last_name
from weft.check.training import Training


def together_on_one_rank(script: Script, training: Training) -> Iterator[Finding]:
    """One rank alone begins what all ranks have to do together."""
    for call in script.calls:
        what = _collective_kind(script, training, call)
        guard = _guard(script, call) if what else None
        if guard is None or what is None or _in_both(script, call, guard):
            continue
        certain = what == "collective" or (what == "state" and bool(script.partitions))
        yield Finding(
            "together_on_one_rank",
            Grade.WRONG if certain else Grade.HINT,
            call.lineno,
            f"{ast.unparse(call.func)}() needs all ranks, and only those come that pass `{guard.rank}` in line "
            f"{guard.test.lineno}: the job ends with an error, or waits for ever",
            f"{_result(script, call)}  # before line {guard.test.lineno}, on every rank",
        )


def saved_by_every_rank(script: Script, training: Training) -> Iterator[Finding]:
    """All ranks write one file."""
    if not script.distributed:
        return
    for call in script.named("torch.save"):
        path = argument(call, 1, "f")
        if path is None or not _is_one_path(script, path) or comes_alone(script, call):
            continue
        yield Finding(
            "saved_by_every_rank",
            Grade.WRONG if script.copied or (script.partitions or 1) > 1 else Grade.HINT,
            call.lineno,
            f"every rank writes {ast.unparse(path)} at the same time, and what is in it then is chance",
            _saved(script, call, path),
        )


def _saved(script: Script, call: ast.Call, path: ast.expr) -> str:
    """The lines that save once; each rank's own part goes into a file of its own."""
    what = ast.unparse(argument(call, 0, "obj") or call)
    if script.splits and "local_state_dict" in what:
        return f"{script.weft}.save({what}, {ast.unparse(path)})  # with the rank in the file's name"
    rank = f"{script.weft}.rank()" if script.splits else "torch.distributed.get_rank()"
    return f"state = {what}\nif {rank} == 0:\n    torch.save(state, {ast.unparse(path)})"


def _guard(script: Script, call: ast.Call) -> Alone | None:
    """The `if` for one rank around a call, or around the only call of the function that it is in."""
    function, own = script.function_of(call), alone(script, call)
    if own is not None or function is None:
        return own
    callers = script.callers(function)
    return alone(script, callers[0]) if len(callers) == 1 else None


def _collective_kind(script: Script, training: Training, call: ast.Call) -> str | None:
    """The kind of a call that needs all ranks: a collective, one of a split model, or maybe the latter. None for
    others.
    """
    full, last = script.name(call.func), last_name(call.func)
    owner = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if (
        full in {f"torch.distributed.{name}" for name in COLLECTIVES}
        and keyword(call, "group") is None
        and len(call.args) < 3
    ):
        return None if last in ("barrier", "broadcast") else "collective"  # one after the other is a habit
    step = training.step_called(call)
    if step is not None and (step.trains or script.partitions != 1):
        return "state"
    if not script.splits or script.partitions == 1:  # a rank alone has the whole model
        return None
    if full in {
        f"{WEFT}.{name}" for name in WEFT_COLLECTIVES if name not in ("barrier", "allgather", "broadcast")
    }:
        return "state"
    if last != "state_dict" or owner not in training.models | training.optimizers:
        return None
    return "state" if training.origin(call, owner) else "maybe"


def _in_both(script: Script, call: ast.Call, guard: Alone) -> bool:
    """True if the other ranks make the same call in the other branch."""
    text = ast.unparse(call.func)
    inside = {id(each) for statement in guard.test.body for each in ast.walk(statement)}
    other = guard.test.orelse if id(call) in inside else guard.test.body
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func) == text
        for statement in other
        for each in ast.walk(statement)
    )


def _result(script: Script, call: ast.Call) -> str:
    """The line that makes the call where all ranks come."""
    statement = next(each for each in script.above(call) if isinstance(each, ast.stmt))
    if isinstance(statement, ast.Assign | ast.Expr) and statement.value is call:
        return ast.unparse(statement)
    return f"{'state' if last_name(call.func) == 'state_dict' else 'result'} = {ast.unparse(call)}"


def _is_one_path(script: Script, path: ast.expr) -> bool:
    """True if all ranks have the same path: a text, or one that is made of texts and no rank."""
    made = script.value(path)
    if made is None or ranks_in(made):
        return False
    if isinstance(made, ast.Constant):
        return isinstance(made.value, str)
    if isinstance(made, ast.JoinedStr):
        return all(isinstance(each, ast.Constant) or _counts(script, each) for each in made.values)
    return False


def _counts(script: Script, part: ast.expr) -> bool:
    """True if a part of a text is the counter of a loop, which is the same on all ranks."""
    key = dotted(part.value) if isinstance(part, ast.FormattedValue) else None
    loops = [each for each in script.above(part) if isinstance(each, ast.For)]
    return key is not None and any(dotted(loop.target) == key for loop in loops)
