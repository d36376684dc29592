"""All rules, in the order of a script's life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from weft.check import gradients, habits, loaders, model, reads, saving, world
from weft.check.finding import Finding, Grade
from weft.check.script import Given, Script, read_script
from weft.check.training import Training
from weft.untrusted import shown_path, translated

Rule = Callable[[Script, Training], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    loaders.loader_not_sharded, loaders.sampler_by_rank, loaders.sampler_without_epoch, loaders.uneven_last_batch,
    loaders.batch_not_divided, loaders.workers_compete, loaders.loader_without_workers, loaders.copy_not_pinned,
    model.seed_by_rank, model.wrapped_twice, model.optimizer_before_wrap, model.small_batch_norm,
    model.rate_not_scaled, model.spawned_without_guard, reads.read_in_step, reads.read_in_loop, reads.read_in_forward,
    habits.graph_kept, habits.saved_each_step, habits.cache_emptied_each_step, gradients.evaluation_with_gradients,
    reads.refused_in_step, saving.together_on_one_rank, saving.saved_by_every_rank, world.fewer_ranks_than_assumed,
)  # fmt: skip
MOST = 100
"""Findings of one rule: more of them say nothing more."""


def check_script(path: Path, given: Given | None = None) -> list[Finding]:
    """The findings about a script that is to be distributed, in the order of its lines.

    In a script for one process nothing is wrong yet, so what would be is a hint.

    Args:
        path: The script, which is read only.
        given: What it is started with.

    Raises:
        FormatError: It cannot be read, is too long or nested too deeply, or is not Python.
    """
    script = read_script(path, given)
    with translated(f"{shown_path(path)} cannot be checked"):
        return look(script)


def look(script: Script) -> list[Finding]:
    """The findings of all rules, in the order of the script's lines; one of a kind for each line."""
    training = Training(script)
    found = {(each.rule, each.line): each for rule in RULES for each in islice(rule(script, training), MOST)}
    return sorted(
        (_lowered(script, each) for each in found.values()), key=lambda each: (each.line, each.rule)
    )


def _lowered(script: Script, finding: Finding) -> Finding:
    early = (
        not script.distributed and finding.grade is Grade.WRONG and finding.rule != "spawned_without_guard"
    )
    return replace(finding, grade=Grade.HINT) if early else finding
