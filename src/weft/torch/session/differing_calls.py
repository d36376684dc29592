"""Ranks that run different code in a step end with an error that names the call, instead of waiting for each other.

All ranks of a pipeline make the same calls in the same order, so a number says which call one means. A rank that has
waited for a while sends the others the call at which it is. Who has made that call with other arguments, or another
call in its place, ends the job. Calls in another order need not make anybody wait. So at the end of each step the
first rank gets what the others have called (8 bytes for a call), and compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import DivergenceError
from weft.runtime.microbatch import Microbatch
from weft.torch.calls.call_signature import digest, function_name
from weft.torch.session.pipeline import Pipeline
from weft.transport.channel import WHERE, Key, Message

PATIENCE_S = 2.0
END = ("nothing more: the step function has ended",)
"""The last call of each microbatch."""
BACKWARD = ("a backward pass",)
LIMIT = 8192
"""Of so many calls numbers and texts are kept. With more of them, errors may not know the text of one."""
FLAGS = {True: "on", False: "off"}


class CallCheck:
    """Compares what the ranks of a pipeline call in one ``step``.

    Args:
        pipeline: Has the calls of this rank's microbatches, and hears those of the others.
        ranks: The ranks of the pipeline, by their numbers in the job.
        step: The number of the step.
    """

    def __init__(self, pipeline: Pipeline, ranks: Sequence[int], step: int) -> None:
        self._pipeline = pipeline
        self._ranks = ranks
        self._step = step
        self._sent: dict[int, int] = {}
        """Calls that each microbatch had made when that was sent last."""
        self._open: list[tuple[int, int, int, str]] = []
        """Calls that other ranks have sent and this one has yet to make: peer, microbatch, number, text."""
        self._new: list[Sequence[Any]] = []
        """Calls that no step before has made."""
        self._ended: set[int] = set()
        """The peers of which all microbatches have run."""
        pipeline.logs.clear()

    def look(self, waited_s: float) -> None:
        """Send the others the call at which this rank waits, and compare; ``waited_s``: how long it has waited.

        Raises:
            DivergenceError: Another rank has made another call.
        """
        if waited_s < PATIENCE_S:
            return
        pipeline = self._pipeline
        for index, log in pipeline.logs.items():
            if log and self._sent.get(index) != len(log):
                self._sent[index] = len(log)
                text = json.dumps([len(log), describe(log[-1])])
                for peer in pipeline.others():
                    pipeline.channel.send(peer, Message(Key(WHERE, self._step, index, 0), text=text))
        for peer in pipeline.others():
            for index in range(len(pipeline.logs)):
                while (
                    message := pipeline.channel.mailbox.take(peer, Key(WHERE, self._step, index, 0))
                ) is not None:
                    number, text = json.loads(message.text or "")
                    self._open.append((peer, index, int(number), str(text)))
            message = pipeline.channel.mailbox.take(peer, self._key)
            if message is not None:
                self._take(peer, message)
        for peer in self._ended:
            self._compare_all(peer)
        self._open = [one for one in self._open if not self._is_alike(*one)]

    def end(self, microbatch: Microbatch) -> None:
        """All microbatches have run here. The first rank compares all that the others have called in the step.

        Raises:
            DivergenceError: It is not what the first rank has called.
        """
        pipeline = self._pipeline
        if pipeline.rank:
            pipeline.channel.send(0, Message(self._key, text=self._text()))
            return
        mine = self._numbers()
        for peer in pipeline.others():
            if peer not in self._ended:
                self._take(peer, microbatch.receive(peer, self._key, "the end of the step function"))
            if pipeline.latest[peer] != mine:
                self._compare_all(peer)

    @property
    def _key(self) -> Key:
        """Of the message with all calls of a step."""
        return Key(WHERE, self._step, 0, 1)

    def _number(self, call: Sequence[Any]) -> int:
        """A number that every rank gives the same call."""
        calls = self._pipeline.calls
        number = calls.get(call)
        if number is None:
            if len(calls) > LIMIT:
                calls.clear()
            self._new.append(call)
            number = calls[call] = digest(name_of(call[0]), tuple(call[1:]))
        return number

    def _numbers(self) -> list[int]:
        """The numbers of all calls of this rank, in order."""
        known = self._pipeline.calls
        calls = [call for _, log in sorted(self._pipeline.logs.items()) for call in log]
        numbers = [known.get(call) for call in calls]
        return [self._number(call) for call in calls] if None in numbers else numbers  # type: ignore[return-value]

    def _text(self) -> str:
        """The numbers of all calls, and the texts of new calls; nothing if this step is as the one before."""
        pipeline = self._pipeline
        numbers = self._numbers()
        if numbers == pipeline.latest.get(pipeline.rank):
            return ""
        pipeline.latest[pipeline.rank] = numbers
        return json.dumps([numbers, {self._number(call): describe(call) for call in self._new}])

    def _take(self, peer: int, message: Message) -> None:
        """All calls of a peer have arrived."""
        pipeline = self._pipeline
        self._ended.add(peer)
        if message.text:
            pipeline.latest[peer], texts = json.loads(message.text)
            if len(pipeline.texts) > LIMIT:
                pipeline.texts.clear()
            pipeline.texts.update((int(number), text) for number, text in texts.items())

    def _calls_of(self, peer: int) -> list[list[int]]:
        """The numbers of the calls of a peer's microbatches."""
        logs: list[list[int]] = [[]]
        for number in self._pipeline.latest[peer]:
            logs[-1].append(number)
            if number == self._number(END):
                logs.append([])
        return logs

    def _compare_all(self, peer: int) -> None:
        texts, calls = self._pipeline.texts, self._calls_of(peer)
        for index, theirs in enumerate(calls):
            for place, (call, number) in enumerate(
                zip(self._pipeline.logs.get(index, ()), theirs, strict=False)
            ):
                if self._number(call) != number:
                    self._refuse(index, place + 1, describe(call), peer, texts.get(number, "something else"))
        for other, index, number, text in self._open:
            theirs = calls[index] if other != peer and index < len(calls) else []
            if len(theirs) >= number and texts.get(theirs[number - 1], text) != text:
                self._refuse(index, number, texts[theirs[number - 1]], other, text, peer)

    def _is_alike(self, peer: int, index: int, number: int, text: str) -> bool:
        """True if that call has been made here, too, and alike."""
        log = self._pipeline.logs.get(index, [])
        if len(log) < number:
            return False
        mine = describe(log[number - 1])
        if mine != text:
            self._refuse(index, number, mine, peer, text)
        return True

    def _refuse(
        self, index: int, number: int, mine: str, peer: int, theirs: str, rank: int | None = None
    ) -> None:
        rank = self._pipeline.rank if rank is None else rank
        pair = sorted([(self._ranks[rank], mine), (self._ranks[peer], theirs)])
        calls = ", but ".join(f"rank {rank} calls {what}" for rank, what in pair)
        raise DivergenceError(
            f"in step {self._step} the ranks run different code: as call {number} of microbatch {index} {calls}. What "
            "depends on the rank, the time, or a random generator of one's own must not decide what a step computes: "
            "take one rank's answer on all of them before the step: weft.allgather(answer)[0]"
        )


def name_of(what: Any) -> str:
    """Of a module, or a function, or what a call does instead."""
    if isinstance(what, str):
        return what
    return str(what.name) if hasattr(what, "serial") else function_name(what)


def describe(key: Sequence[Any]) -> str:
    """A call as its signature has it: a function or module, and its arguments.

    >>> describe([torch.add, True, torch.Size([2, 3]), torch.float32, 1])
    'torch.add(float32[2, 3], 1) (grad mode on)'
    """
    what, *parts = key
    if isinstance(what, str):
        return what
    unit = hasattr(what, "serial")
    name = f"{what.name or 'the model'} ({type(what.module).__name__})" if unit else name_of(what)
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
