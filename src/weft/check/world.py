"""Where a script divides by the number of ranks, and gets 0 in a job that is smaller than it assumes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from weft.check.finding import Finding, Grade
from weft.check.script import Given, Script, last_name, parse_script
from weft.check.training import Training
from weft.errors import WeftError

ASKED = ("world_size", "WORLD_SIZE", "get_world_size", "num_replicas")
"""Names of the number of ranks."""
MODULES = ("weft", "smdistributed", "horovod", "torch.distributed")
"""Modules whose `size()` is the number of ranks."""
DIVIDES = (ast.FloorDiv, ast.Div, ast.Mod)


def fewer_ranks_than_assumed(script: Script, training: Training) -> Iterator[Finding]:
    """`world_size // 8` is 0 in a job of fewer than 8 ranks; wrong where something is divided by that."""
    ranks = script.given.ranks
    found = [each for each in script.nodes if isinstance(each, ast.BinOp | ast.AugAssign)]
    divisions = [each for each in found if isinstance(each.op, DIVIDES)]
    divisors = {script.value(each.right if isinstance(each, ast.BinOp) else each.value) for each in divisions}
    for node in divisions:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
            continue
        least = script.whole(node.right)
        if least is None or least == 1 or not _is_number(script, node.left) or _is_guarded(script, node):
            continue
        if ranks is not None and ranks >= least:
            continue
        job = f"{ranks} rank{'' if ranks == 1 else 's'}" if ranks else f"fewer than {least} ranks"
        yield Finding(
            "fewer_ranks_than_assumed",
            Grade.WRONG if ranks and node in divisors else Grade.HINT,
            node.lineno,
            f"{ast.unparse(node)} is 0 in a job of {job}",
            f"max(1, {ast.unparse(node)})  # or start {least} ranks",
        )


def _is_guarded(script: Script, node: ast.AST) -> bool:
    """`max(1, world_size // 8)`, `world_size // 8 or 1`, `... if world_size >= 8 else ...`: nobody sees the 0."""
    around = script.parent.get(node)
    called = isinstance(around, ast.Call) and last_name(around.func) == "max"
    return called or isinstance(around, ast.BoolOp | ast.IfExp)


def explained(text: str, ranks: int, batch: bool = False) -> Iterator[tuple[int, str]]:
    """Lines of a script whose division gives 0 in a job of so many ranks, with a sentence each.

    ``batch``: a batch has 0 samples, which a division *by* the number of ranks may give, too.

    >>> [*explained("batch //= world_size // 8", 2)]
    [(1, 'world_size // 8 is 0 in a job of 2 ranks: write max(1, world_size // 8), or start 8 ranks')]
    """
    try:
        script = parse_script(text, given=Given(ranks=ranks))
    except WeftError:
        return
    for finding in fewer_ranks_than_assumed(script, Training(script)):
        yield finding.line, f"{finding.reason}: write {finding.write.replace('  #', ',')}"
    for node in script.nodes if batch else ():
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.FloorDiv):
            continue
        if _is_number(script, node.right if isinstance(node, ast.BinOp) else node.value):
            shown = ast.unparse(node)
            yield node.lineno, f"{shown} gives 0 for what is below {ranks}: divide more, or start fewer ranks"


def _is_number(script: Script, node: ast.expr) -> bool:
    """An expression is the number of ranks: by its name, or by what is asked for it."""
    names: Sequence[ast.AST] = [node, *([node.func] if isinstance(node, ast.Call) else [])]
    if any(last_name(each) in ASKED for each in names):
        return True
    found = script.value(node)
    if isinstance(found, ast.Call):
        if last_name(found.func) in ("get_world_size", *(["int"] if _reads_size(found) else [])):
            return True
        return last_name(found.func) == "size" and script.name(found.func).startswith(MODULES)
    return False


def _reads_size(call: ast.Call) -> bool:
    """`int(os.environ["WORLD_SIZE"])`."""
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.endswith("WORLD_SIZE")
        for each in ast.walk(call)
    )
