"""Ranks that run different code in a step are told which call differs, instead of waiting for each other.

All ranks of a pipeline make the same calls in the same order, so a number says which call one means. A rank that has
waited for a while tells the others at which call it is. Who has made that call with other arguments, or another call
in its place, ends the job. Nothing is sent as long as nobody waits that long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import DivergenceError
from weft.torch.pipeline import Pipeline
from weft.torch.signature import function_name
from weft.transport.channel import WHERE, Key, Message

PATIENCE_S = 2.0
FLAGS = {True: "on", False: "off"}


class CallCheck:
    """What this rank and its peers were last known to wait at, in one ``step``. ``ranks``: of the pipeline, by position
    in the job."""

    def __init__(self, pipeline: Pipeline, ranks: Sequence[int], step: int) -> None:
        self._pipeline = pipeline
        self._ranks = ranks
        self._step = step
        self._told: dict[int, int] = {}
        """By microbatch the number of calls that it had made when the others were told."""
        self._open: list[tuple[int, int, int, str]] = []
        pipeline.logs.clear()

    def look(self, waited_s: float) -> None:
        """This rank has waited so long; :class:`DivergenceError` if another one waits at another call."""
        if waited_s < PATIENCE_S:
            return
        pipeline = self._pipeline
        for index, log in pipeline.logs.items():
            if log and self._told.get(index) != len(log):
                self._told[index] = len(log)
                text = json.dumps([len(log), described(log[-1])])
                for peer in pipeline.others():
                    pipeline.channel.send(peer, Message(Key(WHERE, self._step, index, 0), text=text))
        for index in range(len(pipeline.logs)):
            for peer in pipeline.others():
                while (
                    message := pipeline.channel.mailbox.take(peer, Key(WHERE, self._step, index, 0))
                ) is not None:
                    number, text = json.loads(message.text or "")
                    self._open.append((peer, index, int(number), str(text)))
        self._open = [one for one in self._open if not self._compared(*one)]

    def _compared(self, peer: int, index: int, number: int, text: str) -> bool:
        """Whether that call has been made here, too, and alike."""
        log = self._pipeline.logs.get(index, [])
        if len(log) < number:
            return False
        mine = described(log[number - 1])
        if mine == text:
            return True
        pair = sorted([(self._ranks[self._pipeline.rank], mine), (self._ranks[peer], text)])
        told = ", but ".join(f"rank {rank} calls {what}" for rank, what in pair)
        raise DivergenceError(
            f"in step {self._step} the ranks run different code: as call {number} of microbatch {index} {told}. What "
            "depends on the rank, the time, or a random generator of one's own must not decide what a step computes: "
            "let one rank decide, and tell the others (weft.broadcast)"
        )


def described(key: Sequence[Any]) -> str:
    """A call as its signature has it: a function or module, and its arguments.

    >>> described([torch.add, True, torch.Size([2, 3]), torch.float32, 1])
    'torch.add(float32[2, 3], 1) (grad mode on)'
    """
    what, *parts = key
    if isinstance(what, str):
        return what
    unit = hasattr(what, "serial")
    name = f"{what.name or 'the model'} ({type(what.module).__name__})" if unit else function_name(what)
    training = f", training {FLAGS[parts[1]]}" if unit else ""
    parts = parts[2:] if unit else parts
    mode = f"grad mode {FLAGS[parts[0]]}{training}"
    parts = parts[1:]
    if len(parts) > 1 and all(part is False or isinstance(part, torch.dtype) for part in parts[:2]):
        mode += "".join(f", autocast {part}" for part in parts[:2] if part)
        parts = parts[2:]
    shown: list[str] = []
    for part in parts:
        if isinstance(part, torch.dtype) and shown and shown[-1].startswith("["):
            shown[-1] = f"{str(part)[6:]}{shown[-1]}"
        elif isinstance(part, torch.Size):
            shown.append(str(list(part)))
        elif isinstance(part, type):
            shown.append(f"a {part.__name__}")
        elif not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type)):
            shown.append(repr(part))
    return f"{name}({', '.join(shown)}) ({mode})"
