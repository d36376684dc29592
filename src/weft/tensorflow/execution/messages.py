"""A step's messages on one rank, and its records: called from Python, and from inside of a graph."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from weft.runtime.allocator import peak_bytes, resident_bytes
from weft.session.recording import record_first
from weft.session.session import wait_timeout_s
from weft.session.step_check import StepCheck
from weft.session.watching import show_opening
from weft.tensorflow.mini_batch import MiniBatch
from weft.tensorflow.session.session import Session
from weft.tensorflow.session.wire import from_torch, to_torch
from weft.transport.channel import VALUE, Key, Message
from weft.watch.progress import Ranks

log = logging.getLogger("weft")
SAMPLES = 256
"""So many values of each tensor are compared in every step."""
VERIFIED = 3
"""So many steps ``weft verify`` compares."""


@dataclass(frozen=True)
class Item:
    """A microbatch's value that goes from one partition to another.

    ``number``: its message's; ``peer``: the other partition."""

    microbatch: int
    number: int
    peer: int
    name: str


class Watcher(Protocol):
    """A watcher beside a step: it sees the inputs, the tensors that are sent, and the results.

    Attributes:
        handles: The variables that it reads, before the step and after it.
    """

    handles: list[Any]

    def begin(self, tensors: Sequence[Any]) -> None: ...

    def note(self, items: Sequence[Item], tensors: Sequence[Any]) -> None: ...

    def wanted(self, results: list[list[Any]]) -> list[Any]: ...

    def end(self, results: Sequence[Sequence[Any]]) -> None: ...


def compare_calls(session: Session, step: int, call: str) -> StepCheck:
    """Send the other ranks of the pipeline what this one was called with; compare with the first one, at least.

    Raises:
        DivergenceError: They were called with something else.
    """
    assert session.channel is not None
    check = StepCheck(
        session.channel,
        session.peers("pp"),
        session.position("pp"),
        step,
        call,
        wait_timeout_s(session.settings),
    )
    with record_first(session):
        check.begin(None)
    return check


def describe_call(name: str, paths: Sequence[str], tensors: Sequence[Any], everything: bool) -> str:
    """A step and its tensors, as JSON, with a digest of some of what is in them; or of ``everything``."""
    content: dict[str, Any] = {"step": name}
    for path, tensor in zip(paths, tensors, strict=True):
        content[path] = f"{tensor.dtype.name}{tensor.shape.as_list()}"
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            continue
        values = tensor.numpy().reshape(-1)
        if not everything:
            values = values[:: max(1, values.size // SAMPLES)]
        key = "the values in" if everything else "some values in"
        content[f"{key} {path}"] = hashlib.blake2b(values.tobytes(), digest_size=6).hexdigest()
    return json.dumps(content)


class Messages:
    """The messages and the recording of this rank's step.

    Whatever fails here has been sent to the other ranks when the error is raised. Inside of a graph it becomes one of
    TensorFlow's own errors.

    Attributes:
        records: Whether the phases are recorded. A graph that was traced without goes on so.
        proof: What compares the step with one process, if something does.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        batch: MiniBatch,
        prove: Callable[[Sequence[Any]], None] | None = None,
        proof: Watcher | None = None,
    ) -> None:
        self.session = session
        self.proof = proof
        self._prove = prove
        self._name, self._batch = name, batch
        self._at_s = 0.0
        self._samples = 0
        self.records = session.recorder is not None
        self._check: StepCheck | None = None

    def begin(self, evaluates: bool, tensors: Sequence[Any]) -> None:
        """A step begins, with these tensors: the other ranks of the pipeline must have the same ones."""
        with self.session.guarded():
            self._begin(evaluates, tensors)
            if self.proof is not None:
                self.proof.begin(tensors)
                self.session.monitor.note("forward", self.session.steps, 0)

    def _begin(self, evaluates: bool, tensors: Sequence[Any]) -> None:
        session = self.session
        session.check_whole()
        session.count_step(evaluates)
        self._samples = self._batch.samples(tensors)
        if session.recorder is not None and not self.records:
            self.records = True
            log.warning(
                "the recording has when %s ran, and nothing of what is in it: the tf.function around was traced "
                "before the recording began. Record from the first weft.init on, or make that function anew",
                self._name,
            )
        if session.channel is None:
            return
        everything = session.settings.checked == "always" or session.steps == 1
        call = describe_call(self._name, self._batch.paths, tensors, everything)
        session.monitor.note("wait", session.steps, None, None, session.peers("pp")[0])
        self._check = compare_calls(session, session.steps, call)
        if self._prove is not None:
            self._prove(tensors)
        session.monitor.note("forward", session.steps, 0)

    def end(self, results: Sequence[Sequence[Any]] = ()) -> None:
        """A step has ended, with these results."""
        session = self.session
        if self.proof is not None:
            with session.guarded():
                self.proof.end(results)
        if session.channel is not None:
            session.channel.mailbox.discard(session.steps)
        if session.recorder is not None:
            session.recorder.end_step(self._samples, peak_bytes())
        if session.views.progress is not None:
            samples = self._samples * session.mesh.rdp
            session.views.progress.step(samples, lambda: Ranks((), resident_bytes()))
        session.monitor.note("", session.steps)
        show_opening(session, self._batch.microbatches)
        if session.settings.verify_report and session.channel is not None and session.steps >= VERIFIED:
            session.failure = SystemExit(0)  # TensorFlow makes an error of its own of it, in a graph
            raise session.failure

    def open(self) -> None:
        """A step of a process without others is called: it is counted, and recorded, at its end."""
        self._at_s = time.perf_counter()

    def close(self, evaluates: bool, tensors: Sequence[Any]) -> None:
        """It has ended, with these tensors.

        TensorFlow computes its microbatches side by side: they count as one piece of work.
        """
        began_s, end_s = self._at_s, time.perf_counter()
        if self.session.recorder is not None:
            self.session.recorder.open_step(began_s)
        self._begin(evaluates, tensors)
        if self.session.recorder is not None:
            self.session.recorder.add("F", self.session.steps, 0, began_s, end_s, stage=0)
        self.end()

    def exchange(self, sent: Sequence[Item], tensors: Sequence[Any], received: Sequence[Item]) -> list[Any]:
        """The values of other partitions, when they are there; before that, values go to other partitions.

        ``tensors``: the values of ``sent``.
        """
        session = self.session
        with session.guarded():
            self._send(sent, tensors)
            found = [self._receive(item) for item in received]
            if found:  # a graph does not show what it does then
                session.monitor.note("compute", session.steps, received[0].microbatch)
            return found

    def _receive(self, item: Item) -> Any:
        session = self.session
        assert session.channel is not None
        key = Key(VALUE, session.steps, item.microbatch, item.number)
        message = session.channel.mailbox.take(item.peer, key)
        if message is None:
            if self._check is not None:
                self._check.look()
            peer = session.peers("pp")[item.peer]
            session.monitor.note("wait", session.steps, item.microbatch, None, peer)
            began = time.perf_counter()
            timeout_s = wait_timeout_s(session.settings)
            message = session.channel.mailbox.receive(
                item.peer, key, timeout_s,
                f"nothing arrived for {timeout_s:g} s on rank {session.rank}, which waits for {item.name} of "
                f"microbatch {item.microbatch} from rank {peer}. If a rank may take this long between two steps, raise "
                '"wait_timeout" (seconds).',
            )  # fmt: skip
            if session.recorder is not None:
                session.recorder.add("wait", session.steps, item.microbatch, began, time.perf_counter(), peer)
        return from_torch(message.payload)

    def _send(self, items: Sequence[Item], tensors: Sequence[Any]) -> None:
        channel = self.session.channel
        assert channel is not None
        if self.proof is not None:
            self.proof.note(items, tensors)
        for item, tensor in zip(items, tensors, strict=True):
            key = Key(VALUE, self.session.steps, item.microbatch, item.number)
            channel.send(item.peer, Message(key, to_torch(tensor)))

    def start(self, phase: str, microbatch: int) -> None:
        """A phase begins to compute."""
        self.session.monitor.note(phase, self.session.steps, microbatch)
        self._at_s = time.perf_counter()

    def done(self, kind: str, microbatch: int, stage: int) -> None:
        """A phase has computed."""
        recorder = self.session.recorder
        if recorder is not None:
            recorder.add(kind, self.session.steps, microbatch, self._at_s, time.perf_counter(), stage=stage)
