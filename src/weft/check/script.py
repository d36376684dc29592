"""A script's syntax tree, with what its names stand for: imports, values that are assigned once, settings.

Nothing is believed of a name that is assigned twice: a rule that needs its value stays silent then.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from weft.config import ALIASES
from weft.errors import FormatError
from weft.untrusted import read_text, reason, shown_path, shown_text, translated


def dotted(node: ast.AST | None) -> str | None:
    """A name or attribute as it is written: `self.loader`; None for all else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def last_name(node: ast.AST) -> str:
    """`step` of `optimizer.step`; empty for what is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a call's keyword."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument by its position or its keyword."""
    return call.args[position] if len(call.args) > position else keyword(call, name)


def rewritten(
    call: ast.Call, signature: tuple[str, ...] = (), without: tuple[str, ...] = (), **keywords: str
) -> str:
    """A call as it should be written: with these keywords, and without those.

    Args:
        call: The call as it is.
        signature: The names of its arguments by position.
        without: Flags that are left out.
        keywords: What is changed in its place, or added at the end.
    """
    arguments = []
    for number, value in enumerate(call.args):
        name = signature[number] if number < len(signature) else ""
        arguments.append("False" if name in without else keywords.pop(name, "") or ast.unparse(value))
    for each in call.keywords:
        if each.arg is None:
            arguments.append(f"**{ast.unparse(each.value)}")
        elif each.arg not in without:
            arguments.append(f"{each.arg}={keywords.pop(each.arg, '') or ast.unparse(each.value)}")
    arguments += [f"{name}={text}" for name, text in keywords.items()]
    return f"{ast.unparse(call.func)}({', '.join(arguments)})"


def imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local names, and what they stand for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.split(".")[0]
                yield each.asname or first, each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a node writes, with their values where these are written down."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield from _targets(node.target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield from _targets(node.target, None)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _targets(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _targets(node.optional_vars, None)
    elif isinstance(node, ast.arg):
        yield node.arg, None


def _targets(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Tuple | ast.List):
        written = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        same = len(written) == len(target.elts) and not any(isinstance(e, ast.Starred) for e in target.elts)
        for number, each in enumerate(target.elts):
            yield from _targets(each, written[number] if same else None)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value, None)
    elif (key := dotted(target)) is not None:
        yield key, value


LIMIT_BYTES = 1 << 19
"""Bytes of a script that are read."""
WEFT = "weft.torch"
FORMER = {"smdistributed.modelparallel.torch": WEFT}
"""Other names under which scripts import weft."""

MOST_CALLERS = 20
"""So many calls of a function are looked at."""
STARTERS = ("spawn", "start_processes", "Process", "ProcessPoolExecutor", "Pool")
"""What starts processes that run a function."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class Given:
    """The numbers that the script is started with; None where nobody said.

    Attributes:
        ranks: Processes of the job.
        cores: Of the machine.
        partitions: In place of the script's setting.
        microbatches: In place of the script's setting.
    """

    ranks: int | None = None
    cores: int | None = None
    partitions: int | None = None
    microbatches: int | None = None


def read_script(path: Path, given: Given | None = None) -> Script:
    """A script from its file, which is read only.

    Raises:
        FormatError: It cannot be read, is too long or nested too deeply, or is not Python; with the line.
    """
    return parse_script(read_text(path, LIMIT_BYTES), shown_path(path), given)


def parse_script(text: str, name: str = "script.py", given: Given | None = None) -> Script:
    """A script from its text; `name` is what errors call it.

    Raises:
        FormatError: It is nested too deeply, or is not Python; with the line.

    >>> parse_script("x = (1")
    Traceback (most recent call last):
    weft.errors.FormatError: script.py:1: this is not Python ('(' was never closed): mend that line first
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own, which Python shows when it runs
            tree = ast.parse(text.removeprefix("\ufeff"))
    except SyntaxError as error:
        why = shown_text(error.msg or reason(error))
        raise FormatError(
            f"{name}:{error.lineno or 1}: this is not Python ({why}): mend that line first"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{name}: this is not Python ({reason(error)}): is it the right file?") from None
    with translated(f"{name} cannot be checked"):
        return Script(tree, given or Given())


class Script:
    """The tree, and questions that many rules ask."""

    def __init__(self, tree: ast.Module, given: Given) -> None:
        self.tree = tree
        self.given = given
        self.nodes = [*ast.walk(tree)]
        self.parent = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imports = dict(imports(self.nodes))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = {node.name: node for node in self.nodes if isinstance(node, Function)}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}

    # --- names ----------------------------------------------------------------------------------------------

    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression, as it was imported; empty if it begins with no name.

        `smp.step` is `weft.torch.step` where the script has `import weft.torch as smp`.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        found = ".".join([self.imports.get(node.id, node.id), *reversed(parts)])
        former = next((one for one in FORMER if found == one or found.startswith(f"{one}.")), None)
        return FORMER[former] + found.removeprefix(former) if former else found

    @cached_property
    def weft(self) -> str:
        """The script's own name for weft."""
        return next((local for local, full in self.imports.items() if FORMER.get(full, full) == WEFT), WEFT)

    def named(self, *names: str) -> list[ast.Call]:
        """The calls of functions with such full names."""
        return [call for call in self.calls if self.name(call.func) in names]

    def ending(self, *names: str) -> list[ast.Call]:
        """The calls of functions and methods whose last name is one of these."""
        return [call for name in names for call in self._by_name.get(name, ())]

    @cached_property
    def _by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            found.setdefault(last_name(call.func), []).append(call)
        return found

    def callers(self, function: Function) -> list[ast.Call]:
        """The calls of a function by its name, of a method by `self`; at most so many as are worth a look."""
        method = isinstance(self.parent.get(function), ast.ClassDef)
        wanted = f"self.{function.name}" if method else function.name
        return [call for call in self.ending(function.name) if dotted(call.func) == wanted][:MOST_CALLERS]

    def is_started(self, function: Function) -> bool:
        """True if processes are started that run a function."""
        return any(
            isinstance(each, ast.Name) and each.id == function.name
            for call in self.ending(*STARTERS)
            for each in (*call.args, *(given.value for given in call.keywords))
        )

    # --- where ----------------------------------------------------------------------------------------------

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside."""
        while (parent := self.parent.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """The function whose code this is."""
        return next((each for each in self.above(node) if isinstance(each, Function)), None)

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop of the same function that runs this again and again."""
        child = node
        for each in self.above(node):
            if isinstance(each, Loop) and child is not getattr(each, "iter", None):
                return each
            if isinstance(each, Function | ast.Lambda):
                return None
            child = each
        return None

    def comes_after(self, later: ast.AST, earlier: ast.AST) -> bool:
        """True if one node always runs before the other: its statement stands before one that holds the other."""
        statement = next(each for each in (earlier, *self.above(earlier)) if isinstance(each, ast.stmt))
        block, around = self.parent.get(statement), {later, *self.above(later)}
        for _, statements in ast.iter_fields(block) if block is not None else ():
            if isinstance(statements, list) and statement in statements:
                return any(each in around for each in statements[statements.index(statement) + 1 :])
        return False

    # --- values ---------------------------------------------------------------------------------------------

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr | None]]:
        """The values assigned to each name or attribute, wherever; None for those that are not written there."""
        found: dict[str, list[ast.expr | None]] = {}
        for node in self.nodes:
            for target, value in assignments(node):
                found.setdefault(target, []).append(value)
        return found

    def value(self, node: ast.expr | None) -> ast.expr | None:
        """An expression, or for a name the one expression that is assigned to it."""
        for _ in range(4):
            key = dotted(node)
            values = self.assigned.get(key, []) if key else []
            if len(values) != 1 or values[0] is None:
                return node
            node = values[0]
        return node

    def constant(self, node: ast.expr | None) -> object:
        """The number, text or truth that an expression is; None if that is not written down."""
        found = self.value(node)
        return found.value if isinstance(found, ast.Constant) else None

    def whole(self, node: ast.expr | None) -> int | None:
        """A whole number above 0, also as a product."""
        found = self.value(node)
        if isinstance(found, ast.BinOp) and isinstance(found.op, ast.Mult):
            sides = [self.constant(found.left), self.constant(found.right)]
        else:
            sides = [self.constant(found)]
        product = 1
        for side in sides:
            if not isinstance(side, int) or isinstance(side, bool) or not 0 < side < 1 << 40:
                return None
            product *= side
        return product

    # --- the job --------------------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> dict[str, object] | None:
        """The settings given to `init`, by name, with None for what is not written there; None if unreadable."""
        calls = self.named(f"{WEFT}.init")
        if len(calls) != 1:
            return None
        written = self.value(calls[0].args[0] if calls[0].args else keyword(calls[0], "config"))
        if not isinstance(written, ast.Dict) or not all(
            isinstance(key, ast.Constant) for key in written.keys
        ):
            return None
        pairs = zip(written.keys, written.values, strict=True)
        keys = [(str(self.constant(key)), value) for key, value in pairs]
        return {ALIASES.get(key, key): self.constant(value) for key, value in keys}

    def setting(self, name: str, default: int) -> int | None:
        """A number among the settings; None if it is not known."""
        given = getattr(self.given, name, None)
        if given is not None or self.settings is None:
            return given if isinstance(given, int) else None
        found = self.settings.get(name, default)
        return found if isinstance(found, int) else None

    @cached_property
    def splits(self) -> bool:
        """True if weft splits this script's model."""
        return bool(self.named(f"{WEFT}.DistributedModel"))

    @cached_property
    def replicates(self) -> bool:
        """True if the script makes copies of its model by itself."""
        return any(self.name(call.func).endswith("DistributedDataParallel") for call in self.calls)

    @cached_property
    def uses_gpu(self) -> bool:
        """True if the script names CUDA: `x.cuda()`, `torch.cuda`, `"cuda:0"`."""
        return any(
            (isinstance(each, ast.Attribute) and each.attr == "cuda")
            or (
                isinstance(each, ast.Constant)
                and isinstance(each.value, str)
                and each.value.startswith("cuda")
            )
            for each in self.nodes
        )

    @property
    def distributed(self) -> bool:
        """True if it is a script for several processes at all."""
        return self.splits or self.replicates

    @property
    def partitions(self) -> int | None:
        """Into how many the model is split."""
        return self.setting("partitions", 1) if self.splits else self.given.partitions or 1

    @property
    def microbatches(self) -> int | None:
        """Into how many a mini-batch is cut."""
        return self.setting("microbatches", 1) if self.splits else self.given.microbatches

    @property
    def copied(self) -> bool | None:
        """True if several replicas train; None if that depends on how the script is started."""
        if not self.distributed:
            return None
        if self.given.ranks is not None and self.partitions is not None:
            return self.given.ranks > self.partitions
        wanted = self.partitions == 1 and bool((self.settings or {}).get("ddp"))
        return True if self.replicates or wanted else None
