"""Phases that XLA compiles, where the user asks for that. Messages between ranks stay outside of what is compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import tensorflow as tf

from weft.tensorflow import private
from weft.tensorflow.execution.executor import Runnable
from weft.tensorflow.execution.functions import Cutter, PhaseFunction

log = logging.getLogger("weft")


def compile_phases(cutter: Cutter, runnable: Runnable) -> dict[int, str]:
    """Have XLA compile a rank's phases; those that it cannot compile, by position, with XLA's reason.

    These run without XLA, and the log says so. The variables of the rank have their values when this is called.
    """
    found: dict[int, str] = {}
    for position, function in runnable.functions.items():
        reason = find_hindrance(function)
        if reason is None:
            runnable.functions[position] = cutter.function(function.phase, compiled=True)
        elif reason:
            found[position] = reason
    for text in describe(runnable, found):
        log.warning("%s", text)
    return found


def find_hindrance(function: PhaseFunction) -> str | None:
    """Why XLA does not compile a phase; empty where there is nothing to compile, None if it does."""
    if function.function is None:
        return ""
    signature = (*function.function.inputs, *function.function.outputs)
    if any(tensor.dtype in (tf.variant, tf.string) for tensor in signature):
        return "it takes or hands on a text or a list of tensors, the states of a loop say"
    return private.xla_hindrance(function.function)


def describe(runnable: Runnable, hindered: Mapping[int, str]) -> list[str]:
    """The phases that run without XLA, in words; those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for position, reason in sorted(hindered.items()):
        kind, stage = runnable.describe(position)
        what = f"the {'forward' if kind == 'F' else 'backward'} pass of stage {stage}"
        by_reason.setdefault(reason, []).append(what if stage >= 0 else "what is outside of the stages")
    return [
        f"XLA does not compile {', '.join(names)}, which run without it: {reason}"
        for reason, names in by_reason.items()
    ]
