"""Values that are read while steps run, and calls that a step refuses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.gradients import without_gradients
from weft.check.script import WEFT, Function, Loop, Script, dotted, last_name
from weft.check.training import Training

READS = ("item", "tolist", "numpy", "cpu")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier", "broadcast",
    "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
)  # fmt: skip
"""Of `torch.distributed`."""
MOST_BASES = 20
"""So far up a class is followed."""
WEFT_COLLECTIVES = (
    "barrier",
    "allgather",
    "broadcast",
    "save_checkpoint",
    "resume_from_checkpoint",
    "clip_grad_norm_",
)
"""Of weft."""


def read_in_step(script: Script, training: Training) -> Iterator[Finding]:
    """A value is read inside of a step."""
    for call in script.ending(*READS):
        step = training.step_of(call)
        if step is None or not isinstance(call.func, ast.Attribute) or call.args:
            continue
        yield Finding(
            "read_in_step",
            Grade.SLOW,
            call.lineno,
            f"each microbatch waits here until .{call.func.attr}() has its value, and the pipeline's ranks with it",
            f"return {ast.unparse(call.func.value)}  # a tensor; read it from what {step.function.name}(...) gives",
        )


def read_in_loop(script: Script, training: Training) -> Iterator[Finding]:
    """A value is read in every step of the loop that trains."""
    read = {key for _, key in training.read}
    for loop in training.loops:
        for node in ast.walk(loop):
            if not isinstance(node, ast.Call) or not each_time(script, node, loop):
                continue
            for value in _values_read(node):
                owner = dotted(_owner(value))
                known = (script.function_of(node), owner) in training.read
                if not known and not (owner is None and _names(value) & read):
                    continue
                text = ast.unparse(value)
                yield Finding(
                    "read_in_loop",
                    Grade.SLOW,
                    node.lineno,
                    f"on a GPU every step waits until the device has computed {text}: nothing is queued for it "
                    "meanwhile",
                    _later(statement_of(script, node), text, counter_of(loop)),
                )


def read_in_forward(script: Script, training: Training) -> Iterator[Finding]:
    """A module reads a value of a tensor each time that it runs."""
    for node in script.nodes:
        if not isinstance(node, Function) or node.name != "forward" or not _of_module(script, node):
            continue
        if without_gradients(script, node.body[0]):
            continue
        computed = _computed(script, node)
        for call in ast.walk(node):
            if (
                not isinstance(call, ast.Call)
                or not each_time(script, call, node)
                or _needs_host(script, call)
            ):
                continue
            method = isinstance(call.func, ast.Attribute)
            for value in _values_read(call):
                if method or dotted(value) in computed:
                    yield _in_forward(script, call, ast.unparse(value))


def _in_forward(script: Script, call: ast.Call, value: str) -> Finding:
    statement = ast.unparse(statement_of(script, call))
    kept = statement.replace(ast.unparse(call), f"{value}.detach()")
    return Finding(
        "read_in_forward",
        Grade.SLOW,
        call.lineno,
        f"on a GPU each forward pass waits here until the device has computed {value}, and in a split model the other "
        "ranks wait, too",
        f"if not self.training: {statement}" if last_name(call.func) == "print" else kept,
    )


def _of_module(script: Script, function: Function) -> bool:
    """True for a method of a class that derives from `Module`, also through classes of the script."""
    known = script.parent.get(function)
    for _ in range(MOST_BASES):
        bases = [last_name(base) for base in known.bases] if isinstance(known, ast.ClassDef) else []
        if "Module" in bases or "LightningModule" in bases:
            return True
        known = next((script.classes[base] for base in bases if base in script.classes), None)
    return False


def _computed(script: Script, function: Function) -> set[str | None]:
    """Names of a function that hold what the module's own children or PyTorch's functions give."""
    found: set[str | None] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = script.name(node.value.func)
            if name.startswith(("self.", "torch.")) and len(node.targets) == 1:
                found.add(dotted(node.targets[0]))
    return found - {None}


def _needs_host(script: Script, call: ast.Call) -> bool:
    """True within a call that takes its lengths from the host."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) == "pack_padded_sequence"
        for each in script.above(call)
    )


def refused_in_step(script: Script, training: Training) -> Iterator[Finding]:
    """A step calls what belongs before or after it."""
    if script.partitions == 1:
        return
    for call in script.calls:
        step = training.step_of(call)
        if step is None or not _is_refused(script, training, call):
            continue
        yield Finding(
            "refused_in_step",
            Grade.WRONG if script.partitions else Grade.HINT,
            call.lineno,
            f"{ast.unparse(call.func)}() is refused inside of a step that is split, whose microbatches are in flight "
            "together",
            f"{step.function.name}(...)  # and in the loop, before or after it: {ast.unparse(call)}",
        )


def _is_refused(script: Script, training: Training, call: ast.Call) -> bool:
    full, last = script.name(call.func), last_name(call.func)
    owner = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if full in {f"torch.distributed.{name}" for name in COLLECTIVES} | {
        f"{WEFT}.{name}" for name in WEFT_COLLECTIVES
    }:
        return True
    if full.startswith("torch.nn.utils.clip_grad"):
        return True
    optimizers = training.optimizers | {"optimizer"}
    return (owner in optimizers and last in ("step", "zero_grad", "state_dict")) or (
        owner in training.models and last in ("zero_grad", "state_dict")
    )


def _values_read(call: ast.Call) -> Iterator[ast.expr]:
    """The expressions whose values a call reads, as far as is known."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in READS and not call.args:
        yield call.func.value
    elif isinstance(call.func, ast.Name) and call.func.id in ("float", "print") and call.args:
        for each in call.args:
            parts = each.values if isinstance(each, ast.JoinedStr) else [each]
            for part in parts:
                inner = part.value if isinstance(part, ast.FormattedValue) else part
                if dotted(inner) is not None:
                    yield inner


def _owner(value: ast.expr) -> ast.expr:
    """`loss` of `loss.detach().cpu()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return value


def _names(value: ast.expr | None) -> set[str]:
    nodes = ast.walk(value) if value is not None else ()
    return {key for each in nodes if (key := dotted(each)) is not None}


def each_time(script: Script, node: ast.AST, loop: Loop | Function) -> bool:
    """True if it runs whenever the loop or function does, in no inner loop and under no `if`."""
    for each in script.above(node):
        if each is loop:
            return True
        if isinstance(
            each, ast.If | ast.IfExp | ast.For | ast.While | ast.Lambda | ast.FunctionDef | ast.Try
        ):
            return False
    return False


def _later(statement: ast.AST, value: str, counter: str) -> str:
    """The line that keeps a tensor instead of its value where values are collected, or that reads now and then."""
    written = ast.unparse(statement)
    collects = isinstance(statement, ast.AugAssign) or (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and last_name(statement.value.func) == "append"
    )
    kept = written.replace(f"{value}.item()", f"{value}.detach()").replace(
        f"float({value})", f"{value}.detach()"
    )
    if collects and kept != written:
        return f"{kept}  # and read it after the loop"
    return f"if {counter} % 10 == 0: {written}"


def statement_of(script: Script, node: ast.AST) -> ast.AST:
    return next(each for each in script.above(node) if isinstance(each, ast.stmt))


def counter_of(loop: Loop) -> str:
    """The name that counts the turns of a loop; ``step`` if it has none."""
    if isinstance(loop, ast.While):
        return "step"
    counted = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in ("range", "enumerate")
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
    return ast.unparse(first) if counted and isinstance(first, ast.Name) else "step"
