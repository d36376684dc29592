"""Where a script asks which rank it is: to read its own part of the data, or to do something on one rank alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from weft.check.script import Function, Script, last_name

_WHO = "(main|master|chief|first|zero)"
_RANK = re.compile(
    rf"(.*_)?rank|process_index|is_{_WHO}(_(process|rank|worker))?|{_WHO}_(process|rank|worker)"
)
_COPY = ("dp_rank", "rdp_rank")
"""Ranks of copies: those of one pipeline agree in them."""
OWN = (
    "weft.torch.rank", "weft.torch.local_rank", "weft.torch.pp_rank", "weft.torch.mp_rank",
    "torch.distributed.get_rank",
)  # fmt: skip
"""Functions whose results differ between the ranks of one pipeline."""
NOT_READING = (
    "print", "info", "warning", "debug", "set_device", "device", "to", "cuda", "DistributedDataParallel", "DDP",
    "init_process_group", "spawn", "save", "write", "join",
)  # fmt: skip
"""Calls that may get a rank, and read no data by it."""


class Alone(NamedTuple):
    """An `if` by which only some ranks come to a place."""

    test: ast.If
    rank: str


def ranks_in(node: ast.AST, names: Sequence[str] = ()) -> list[str]:
    """The ranks that an expression asks for, only some of them if `names` are given; none for `local_rank != -1`."""
    found = [
        last_name(each)
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute) and last_name(each)
    ]
    return [each for each in found if (each in names if names else _RANK.fullmatch(each))]


def differs_in_pipeline(script: Script, node: ast.expr) -> bool:
    """True if the value is certainly another one on each rank of a pipeline."""
    if isinstance(script.value(node), ast.Call):
        node = script.value(node) or node
    parts = [script.value(each) for each in ast.walk(node) if isinstance(each, ast.expr)]
    return any(isinstance(each, ast.Call) and script.name(each.func) in OWN for each in parts)


def shards(script: Script) -> bool:
    """True if anything but one rank's work may be chosen by the rank: data are then, for all that is known."""
    for node in script.nodes:
        name = last_name(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("RANK"):
            name = "rank"
        if not _RANK.fullmatch(name) or name.startswith(("is_", "local_", "pp_", "mp_")):
            continue
        if isinstance(getattr(node, "ctx", None), ast.Store) or _reads_no_data(script, node):
            continue
        return True
    return False


def alone(script: Script, node: ast.AST) -> Alone | None:
    """The `if` for one rank around a node, or the early `return` of the others before it, in the same function."""
    child = node
    for each in script.above(node):
        if isinstance(each, ast.If) and child is not each.test and (rank := _one_rank(script, each.test)):
            return Alone(each, rank)
        if isinstance(child, ast.stmt) and child in _gone(script):
            return _gone(script)[child]
        if isinstance(each, Function):
            return None
        child = each
    return None


def comes_alone(script: Script, node: ast.AST, depth: int = 3) -> bool:
    """True if some ranks alone may come to a node, also through the functions that call its own."""
    if alone(script, node) is not None or any(isinstance(each, ast.If) for each in script.above(node)):
        return True
    function = script.function_of(node)
    decorators = [] if function is None else function.decorator_list
    if any(word in ast.unparse(each) for each in decorators for word in ("rank", "main_process")):
        return True
    if function is None or function.name == "main" or script.is_started(function):
        return False
    callers = script.callers(function)
    return depth == 0 or not callers or any(comes_alone(script, call, depth - 1) for call in callers)


def _one_rank(script: Script, test: ast.expr) -> str:
    """The rank that a test compares, if only some ranks of a job pass it; empty if it may be all of them."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return ""
    for part in parts:
        inner = part.operand if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not) else part
        if isinstance(inner, ast.Compare):
            found = _compared(inner)
        elif isinstance(inner, ast.Call) or inner is not part:
            found = next(iter(ranks_in(inner.func if isinstance(inner, ast.Call) else inner)), "")
            found = found or _asked(script, inner)
        else:
            found = ""
        if found and found not in _COPY:
            return found
    return ""


def _compared(test: ast.Compare) -> str:
    """The rank in `rank == 0`; empty for `local_rank != -1` and `rank is None`, which ask whether there are any."""
    values = [each.value for each in test.comparators if isinstance(each, ast.Constant)]
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.NotEq) or None in values:
        return ""
    side = test.comparators[0]
    if isinstance(side, ast.UnaryOp):
        return ""
    sides = [test.left, *test.comparators]
    plain = [each.func if isinstance(each, ast.Call) else each for each in sides]
    return next((last_name(each) for each in plain if _RANK.fullmatch(last_name(each))), "")


def _asked(script: Script, node: ast.expr) -> str:
    """The rank that a function of the script compares, for a call of it."""
    function = script.functions.get(last_name(node.func)) if isinstance(node, ast.Call) else None
    if function is None or not function.body or not isinstance(function.body[-1], ast.Return):
        return ""
    value = function.body[-1].value
    return _compared(value) if isinstance(value, ast.Compare) else ""


@lru_cache(maxsize=1)
def _gone(script: Script) -> dict[ast.stmt, Alone]:
    """For each statement the `if` before it, in the same block, at which other ranks have left."""
    found = {}
    for node in script.nodes:
        for _, statements in ast.iter_fields(node):
            if not isinstance(statements, list):
                continue
            left = None
            for each in statements:
                if left is not None:
                    found[each] = left
                elif isinstance(each, ast.If) and _leaves(each) and (rank := _one_rank(script, each.test)):
                    left = Alone(each, rank)
    return found


def _leaves(test: ast.If) -> bool:
    """True if who passes a test goes no further."""
    last = test.body[-1]
    call = last.value if isinstance(last, ast.Expr) else None
    ends = isinstance(call, ast.Call) and last_name(call.func) in ("exit", "_exit")
    return not test.orelse and (ends or isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise))


def _passes_on(script: Script, call: ast.Call, given: ast.AST) -> bool:
    """True if a function of the script gets the rank under such a name: what it does with it stands there."""
    if isinstance(given, ast.keyword):
        return isinstance(call.func, ast.Name) and bool(_RANK.fullmatch(given.arg or ""))
    function = script.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
    names = [each.arg for each in function.args.args] if function is not None else []
    place = next((number for number, each in enumerate(call.args) if each is given), len(names))
    return place < len(names) and _RANK.fullmatch(names[place]) is not None


def _reads_no_data(script: Script, node: ast.AST) -> bool:
    """True if no data are read by a rank here: it is passed on, or compared for one rank's work."""
    child = node
    for each in script.above(node):
        if isinstance(each, ast.keyword) and each.arg == "device_ids":
            return True
        if isinstance(each, ast.Call) and child is not each.func:
            if last_name(each.func) in NOT_READING or _passes_on(script, each, child):
                return True
        if isinstance(each, ast.If | ast.IfExp) and child is each.test:
            return True
        if isinstance(each, ast.Assign):
            return all(_RANK.fullmatch(last_name(target)) for target in each.targets)
        if isinstance(each, ast.Return):
            return isinstance(each.value, ast.Compare)
        if isinstance(each, ast.stmt):
            return isinstance(each, Function)
        child = each
    return False
