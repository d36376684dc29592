"""Ranks of a pipeline compare at the beginning of a step what they were called with.

They look at it when they have nothing else to do, so that it costs no time, and before they could wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import DivergenceError
from weft.launch.startup import first_difference
from weft.transport.channel import BEGIN, Channel, Key, Message

ADVICE = (
    ". The ranks of one pipeline must read the same batches: seed, shuffle and shard the data by weft.dp_rank(), not "
    "by weft.rank()"
)
STEP_ADVICE = (
    ". Every rank calls the same steps in the same order: is one under `if weft.rank() == 0`? A step that one rank "
    "alone called leaves the ranks in different places of the script"
)

CHANGES = "the changes of the model"
"""The name under which a call has what was changed in its models since they were split."""
CHANGES_ADVICE = (
    ". Change the model between steps on every rank alike. A module that casts its own parameters as it runs does so "
    "on its rank alone, unless it ran in the first step: cast them before that, with module.to(dtype)"
)

SETTINGS_ADVICE = (
    ". Load states and set rates, scales and weights on every rank alike, not under `if rank() == 0`. Before the first "
    "step one rank may do it alone: all begin with what the first rank has"
)


def advice_for(calls: Iterable[str]) -> str:
    """Advice about ranks that were called differently, each as its JSON says."""
    found = [*map(json.loads, calls)]
    if len({call.get("step", "").partition(",")[0] for call in found}) > 1:
        return STEP_ADVICE
    return CHANGES_ADVICE if len({json.dumps(call.get(CHANGES)) for call in found}) > 1 else ADVICE


def differing(settings_by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """In words, where ranks differ in what all must have alike, such as rates, and what to do; empty if they do not.

    Names that only some ranks have do not count: an object that nobody uses any more lives on in some processes.
    """
    common = set[str].intersection(*map(set, settings_by_rank.values()))
    shared = {
        rank: {name: each[name] for name in each if name in common} for rank, each in settings_by_rank.items()
    }
    difference = first_difference(shared).partition(": ")[2]
    return f"the ranks were set differently: {difference}{SETTINGS_ADVICE}" if difference else ""


def refuse_differing(step: int, settings_by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Compare what ranks have that all must have alike.

    Raises:
        DivergenceError: Values differ; the text names the first difference.
    """
    difference = differing(settings_by_rank)
    if difference:
        raise DivergenceError(f"in step {step} {difference}")


@dataclass
class StepCheck:
    """The comparison of the ranks' calls of one step, and the first rank's decision, which all use.

    Attributes:
        channel: Between the ranks of the pipeline.
        ranks: Those ranks, by their number in the job.
        me: Which of them this one is.
        step: The number of the step.
        call: What this rank was called with, as JSON.
        timeout_s: How long this rank waits for the first one.
        settings: What this rank has that all must have alike, as JSON.
        waiting: The peers whose message has not come yet.
    """

    channel: Channel
    ranks: tuple[int, ...]
    me: int
    step: int
    call: str
    timeout_s: float
    settings: str = "{}"
    waiting: list[int] = field(default_factory=list)

    def begin(self, own: Any) -> Any:
        """The decision of the pipeline's first rank, on every rank.

        Sends the peers what this rank was called with. ``own``: the decision (JSON), on the first rank. The
        others wait for the first rank: they could not run before it has begun anyway.
        """
        self.waiting = [peer for peer in range(len(self.ranks)) if peer != self.me]
        text = json.dumps([own, self.call, self.settings])
        for peer in self.waiting:
            self.channel.send(peer, Message(self.key, text=text))
        if self.me == 0:
            return own
        return self._receive(0)

    def wait_for_all(self) -> None:
        """Wait for the message of every peer, and compare.

        Raises:
            DivergenceError: A peer was called with something else.
        """
        while self.waiting:
            self._receive(self.waiting[0])

    def _receive(self, peer: int) -> Any:
        message = self.channel.mailbox.receive(
            peer, self.key, self.timeout_s,
            f"rank {self.ranks[self.me]} began step {self.step}, but rank {self.ranks[peer]} did not for "
            f"{self.timeout_s:g} s: does it call the step less often, or wait in a collective of its own?",
        )  # fmt: skip
        self.waiting.remove(peer)
        theirs, call, settings = json.loads(message.text or "")
        self._compare(peer, call, settings)
        return theirs

    @property
    def key(self) -> Key:
        """The key of the messages at the beginning of this step."""
        return Key(BEGIN, self.step, 0, 0)

    def look(self) -> None:
        """Compare with what has arrived.

        Raises:
            DivergenceError: A peer was called with something else; the text names the first difference.
        """
        for peer in list(self.waiting):
            message = self.channel.mailbox.take(peer, self.key)
            if message is not None:
                self.waiting.remove(peer)
                self._compare(peer, *json.loads(message.text or "")[1:])

    def _compare(self, peer: int, call: str, settings: str) -> None:
        mine, other = self.ranks[self.me], self.ranks[peer]
        if settings != self.settings:
            both = {mine: json.loads(self.settings), other: json.loads(settings)}
            refuse_differing(self.step, dict(sorted(both.items())))
        if call == self.call:
            return
        pair = dict(sorted({mine: {"input": self.call}, other: {"input": call}}.items()))
        difference = first_difference(pair).partition(": ")[2]
        raise DivergenceError(
            f"in step {self.step} the ranks were called differently: {difference}{advice_for([self.call, call])}"
        )
