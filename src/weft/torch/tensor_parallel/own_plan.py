"""The plan that a model of `transformers` brings along (``tp_plan``), compared with what was found.

Such a plan says by names which weights are cut, and nothing checks it. What a sharded run has shown counts; where the
plan says something else, it is worth a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from weft.torch.tensor_parallel.splits import (
    COLUMN,
    EXPERTS,
    HEADS,
    HOW,
    ONCE,
    ROW,
    VOCABULARY,
    Splits,
    pattern,
)

_CUTS = {
    "colwise": {COLUMN, HEADS, VOCABULARY}, "colwise_gather_output": {COLUMN, HEADS, VOCABULARY},
    "colwise_rep": {COLUMN, HEADS, VOCABULARY}, "packed_colwise": {COLUMN, HEADS}, "local_colwise": {COLUMN, HEADS},
    "local_packed_colwise": {COLUMN, HEADS}, "rowwise": {ROW, HEADS}, "rowwise_rep": {ROW, HEADS},
    "rowwise_split_input": {ROW, HEADS}, "packed_rowwise": {ROW, HEADS}, "local_rowwise": {ROW, HEADS},
    "local_packed_rowwise": {ROW, HEADS}, "embedding_rowwise": {VOCABULARY}, "vocab_rowwise": {VOCABULARY},
    "embedding_colwise": set(),
}  # fmt: skip
"""The styles that cut a weight, and what that is here; other styles leave it whole, or are about what goes through."""


def beside_own_plan(model: nn.Module, splits: Splits) -> str:
    """Where a model's own plan says something else than what was found: a table; empty if the model has no plan.

    Args:
        model: The model, whole or sharded.
        splits: What :func:`weft.torch.tensor_parallel.find` found.
    """
    planned = dict(_planned(model))
    if not planned:
        return ""
    found = _found(splits)
    rows: dict[tuple[str, str, str], int] = {}
    alike = 0
    for name in dict.fromkeys([*found, *planned]):
        style, kind = planned.get(name, ""), found.get(name, "")
        if style and kind in _CUTS[style] or not style and not kind or kind == EXPERTS and style:
            alike += 1
            continue
        here = HOW[kind] if kind else f"whole: {_why(splits, name)}"
        key = pattern(name), style or "nothing", here
        rows[key] = rows.get(key, 0) + 1
    if not rows:
        return f"the model's own plan (tp_plan) says the same of {alike} weights"
    widths = [max(len(key[n]) for key in rows) for n in (0, 1)]
    lines = [
        f"  {name:{widths[0]}}  {count:3}  its plan: {style:{widths[1]}}  here: {here}"
        for (name, style, here), count in rows.items()
    ]
    title = f"the model's own plan (tp_plan) says the same of {alike} weights"
    return "\n".join([f"{title}, and something else of these. What a sharded run has shown counts:", *lines])


def _planned(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The modules and parameters that plans in the model cut, by name, and the style; inner plans come first."""
    plans = [
        (name, plan) for name, module in model.named_modules() if (plan := getattr(module, "_tp_plan", None))
    ]
    names = [
        *(
            name
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ),
        *(name for name, _ in model.named_parameters()),
    ]
    for prefix, plan in reversed(plans):
        if not isinstance(plan, Mapping):
            continue
        for key, style in plan.items():
            if style in _CUTS:
                full = f"{prefix}.{key}" if prefix else str(key)
                wanted = re.compile(r"[^.]+".join(map(re.escape, full.split("*"))))
                for name in names:
                    if wanted.fullmatch(name):
                        yield name, style


def _found(splits: Splits) -> dict[str, str]:
    """The kind of cut by module; of experts, by parameter."""
    found = {}
    for name, linear in splits.linears().items():
        if linear.kind == EXPERTS:
            found.update({f"{name}.{part.name}": EXPERTS for part in linear.parts if part.dim != ONCE})
        else:
            found[name] = linear.kind
    return found


def _why(splits: Splits, name: str) -> str:
    """Why it is whole: it, or what holds it."""
    known = splits.whole.get(name) or splits.whole.get(name.rpartition(".")[0])
    return known or "it is no linear, embedding or mixture of experts"
