"""Pieces of a syntax tree: names, arguments, what is imported and assigned, and calls as they should be written."""

from __future__ import annotations

import ast
from collections.abc import Iterator


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
