"""The proof of a step: what the ranks compute together is compared with what one process computes.

    traced            the pipeline's first rank makes a function of the whole step, beside the phases that ranks run
    before the step   the other ranks send it their variables; it runs all microbatches, one after the other, on copies
    in the step       each rank keeps what it sends to others
    after it          they send that, their gradients and what was written into variables; the first rank compares

A difference is an error on every rank, before the step returns anything. That is done with the first batch of every
trace, since a step that is traced anew is cut into phases anew. Later batches cost nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from weft.errors import VerifyError
from weft.runtime.allocator import host_bytes
from weft.session.collectives import agree_on
from weft.session.session import wait_timeout_s
from weft.tensorflow import private
from weft.tensorflow.execution.compile import Compiled
from weft.tensorflow.execution.messages import VERIFIED, Item
from weft.tensorflow.execution.program import Phase, number_messages
from weft.tensorflow.mini_batch import MiniBatch
from weft.tensorflow.session.session import Session
from weft.tensorflow.session.wire import from_torch, to_torch
from weft.tensorflow.split.phases import EVERYWHERE
from weft.tensorflow.trace.operations import Value
from weft.tensorflow.verify.findings import Findings, Names, Numbers, compare, precision_of
from weft.tensorflow.verify.whole_batch import SHARE
from weft.transport.channel import READ, Key, Message

log = logging.getLogger("weft")

WHAT = "the comparison with one process"


class Proof:
    """One traced step that is compared with one process. Every rank of the pipeline makes one, at the same time.

    Args:
        session: The session.
        title: What messages call the step.
        batch: The mini-batch.
        compiled: The step, cut into phases.
        xla: XLA compiles it.

    Attributes:
        handles: The variables of this rank whose values are read, before the step and after it.
        waits: It was not compared yet.
    """

    def __init__(self, session: Session, title: str, batch: MiniBatch, compiled: Compiled, xla: bool) -> None:
        self._session, self._title, self._batch, self._compiled = session, title, batch, compiled
        self._own = session.position("pp")
        captured, phases = compiled.capture, compiled.phases
        record = captured.record
        every = range(len(captured.variables))
        self._known = [number for number in every if private.has_type(captured.variables[number])]
        mine = (self._own, EVERYWHERE) if self._own == 0 else (self._own,)
        self._variables = [number for number in self._known if phases.owner[number] in mine]
        self.handles = [captured.variables[number] for number in self._variables]
        written = frozenset().union(*(each.writes for each in record.operations))
        self._written = [number for number in self._known if number in written]
        whole = session.settings.verify == "gradients"
        place = {number: at for at, number in enumerate(record.in_order())}
        values = {value for value, _ in number_messages(record, phases, compiled.units.replicated)}
        self._passed = sorted(
            (each for each in values if whole or record.operations[each.operation].gradient_of < 0),
            key=lambda value: (place[value.operation], value.output),
        )
        self._results = [
            number
            for number, value in enumerate(record.results)
            if value is not None and record.operations[value.operation].sendable[value.output]
        ]
        self._gradients = [
            number for number in self._results if captured.gradients[number] is not None and whole
        ]
        self._returned = [number for number in self._results if captured.gradients[number] is None]
        sends = [each for phase in compiled.runnable.program.phases.values() for each in phase.sends]
        at = {value: number for number, value in enumerate(self._passed)}
        self._sent = {number: at[value] for number, value, _ in sends if value in at}
        self._noted: dict[tuple[int, int], Any] = {}
        self._one = Numbers()
        self._began_s = self._spent_s = 0.0
        self._function: Any = None
        self.waits = True
        self._running = False
        self._agree(lambda: self._prepare(xla))

    def _agree(self, find: Any) -> None:
        """Stop, on every rank, where the first one finds a reason against it."""
        session = self._session

        def reason() -> str:
            try:
                return str(find())
            except Exception as error:  # the step itself, which comes next, says it better
                return f"{type(error).__name__}: {error}"

        found = agree_on(session, session.port("pp"), reason, WHAT, session.peers("pp")[0]).strip()
        if found:
            self.waits = self._running = False
            self._report({"step": session.steps, "reason": found})
            if self._own == 0:
                session.views.opening.proof = f"{self._title} was not compared with one process: {found}"
                log.info("verify: %s", session.views.opening.proof)

    # --- when the step is traced ----------------------------------------------------------------------------

    def _prepare(self, xla: bool) -> str:
        """Make the function of the whole step; why it is not compared, in words."""
        compiled, session = self._compiled, self._session
        record, owner = compiled.capture.record, compiled.phases.owner
        if sum(each.bytes for each in record.variables) * SHARE > host_bytes(session.place.local_size):
            return "the model is too large for a copy of it"
        if compiled.bound:
            return "it takes a tensor of the function around"
        written = frozenset().union(*(each.writes for each in record.operations))
        for number in set(range(len(record.variables))) - set(self._known):
            if number in written or owner[number] not in (0, EVERYWHERE):
                return "it uses a table, or another resource that is no variable"
        feeds = [n for n, each in enumerate(record.operations) if each.feed or each.variable >= 0]
        inside = [number for number in record.in_order() if number not in set(feeds)]
        wanted = [*self._passed, *(record.results[number] for number in self._asked())]
        outputs: list[Value] = [each for each in dict.fromkeys(wanted) if each is not None]
        with tf.init_scope():
            function = compiled.cutter.function(Phase(0, inside, feeds, outputs=outputs))
        if function.function is None:
            return "it computes nothing"
        if found := private.effect_of(function.function):
            return f"it does more than to compute ({found})"
        if xla and private.operation_of(function.function, ["Random"]):
            return "it draws random numbers, which are others with XLA"
        self._function = function
        return ""

    def _asked(self) -> list[int]:
        return [*self._returned, *self._gradients]

    # --- before the step ------------------------------------------------------------------------------------

    def begin(self, tensors: Sequence[Any]) -> None:
        """The step begins: run it in one process."""
        if not self.waits:
            return
        self._began_s = time.perf_counter()
        self._running = True
        self._noted.clear()
        session = self._session
        session.monitor.note("verify", session.steps)
        values = self._borrow()
        self._agree(lambda: self._run(tensors, values))
        self._spent_s = time.perf_counter() - self._began_s

    def _borrow(self) -> dict[int, Any]:
        """On the first rank, the values of all variables, by their numbers."""
        owner = self._compiled.phases.owner
        own = {
            number: private.read(handle) for number, handle in zip(self._variables, self.handles, strict=True)
        }
        if self._own:
            for number, value in own.items():
                self._send(0, number, value)
            return {}
        others = [number for number in self._known if number not in own]
        return own | {number: self._receive(owner[number], 0, number) for number in others}

    def _run(self, tensors: Sequence[Any], values: dict[int, Any]) -> str:
        """Run all microbatches on copies of the variables."""
        compiled, function = self._compiled, self._function
        record = compiled.capture.record
        copies: dict[int, Any] = {}
        for number in function.phase.feeds:
            at = record.operations[number].variable
            if at >= 0:
                copies[at] = (
                    tf.Variable(values[at], trainable=False)
                    if at in values
                    else compiled.capture.variables[at]
                )
        self._one = one = Numbers()
        sums: dict[int, list[Any]] = {number: [] for number in self._gradients}
        for part in self._batch.slices(tensors):
            feeds = compiled.feeds(part)
            inputs = [feeds[number] for number in function.feeds]
            found = function.outputs(
                inputs, private.call_with(function.function, inputs, list(copies.values()))
            )
            by_value = dict(zip(function.phase.outputs, found, strict=True))
            one.passed.append([by_value[each].numpy() for each in self._passed])
            one.returned.append(
                {number: by_value[record.results[number]].numpy() for number in self._returned}
            )
            for number, kept in sums.items():
                kept.append(by_value[record.results[number]])
        one.gradients = {number: self._total(number, kept).numpy() for number, kept in sums.items()}
        one.variables = {number: copies[number].numpy() for number in self._written if number in copies}
        return ""

    def _total(self, number: int, parts: Sequence[Any]) -> Any:
        """A gradient over all microbatches; rows stand side by side."""
        rows = number < len(self._compiled.returned) and self._compiled.returned[number].by_rows
        return tf.concat(parts, 0) if rows else tf.add_n(list(parts))

    # --- in the step ----------------------------------------------------------------------------------------

    def note(self, items: Sequence[Item], tensors: Sequence[Any]) -> None:
        """Keep what is sent to other ranks."""
        if self._running:
            for item, tensor in zip(items, tensors, strict=True):
                if item.number in self._sent:
                    self._noted[item.microbatch, self._sent[item.number]] = tensor

    def wanted(self, results: list[list[Any]]) -> list[Any]:
        """Those results of the step, flat, that this rank compares or hands over; of each one all microbatches."""
        return [each for number in self._here(results) for each in results[number]]

    def _here(self, results: Sequence[Sequence[Any]]) -> list[int]:
        wanted = self._compiled.phases.wanted
        asked = self._asked() if self._own == 0 else self._gradients
        return [
            number
            for number in asked
            if wanted[number] in ((0, EVERYWHERE) if self._own == 0 else (self._own,))
            and all(each is not None for each in results[number])
        ]

    # --- after the step -------------------------------------------------------------------------------------

    def end(self, results: Sequence[Sequence[Any]]) -> None:
        """The step has ended, with these results: compare. Every rank of the pipeline calls this.

        Raises:
            VerifyError: Something differs.
        """
        if not self._running:
            return
        began = time.perf_counter()
        session = self._session
        self._running = False
        self.waits = bool(session.settings.verify_report) and session.steps < VERIFIED
        here = self._here(results)
        gradients = {n: self._total(n, results[n]) for n in here if n in self._gradients}
        written = {
            number: private.read(handle)
            for number, handle in zip(self._variables, self.handles, strict=True)
            if number in self._written
        }
        if self._own:
            self._hand_over(gradients, written)
            split = Numbers()
        else:
            split = self._gather(results, gradients, written)
        session.channel.flush()  # type: ignore[union-attr]
        agree_on(
            session, session.port("pp"), lambda: self._judge(split, began), WHAT, session.peers("pp")[0]
        )  # fmt: skip
        self._noted.clear()
        self._one = Numbers()

    def _hand_over(self, gradients: dict[int, Any], written: dict[int, Any]) -> None:
        for (microbatch, at), tensor in sorted(self._noted.items(), key=lambda pair: pair[0]):
            self._send(microbatch, at, tensor)
        for number, tensor in (*gradients.items(), *written.items()):
            self._send(0, number, tensor)

    def _gather(
        self, results: Sequence[Sequence[Any]], gradients: dict[int, Any], written: dict[int, Any]
    ) -> Numbers:
        """The numbers of all ranks, in the order in which they send them."""
        phases, count = self._compiled.phases, len(self._one.returned)
        homes = [phases.partition[value.operation] for value in self._passed]
        passed = {key: tensor.numpy() for key, tensor in self._noted.items()}
        gradient = {number: tensor.numpy() for number, tensor in gradients.items()}
        variables = {number: tensor.numpy() for number, tensor in written.items()}
        for rank in range(1, phases.partitions):
            for microbatch in range(count):
                for at, home in enumerate(homes):
                    if home == rank:
                        passed[microbatch, at] = self._receive(rank, microbatch, at).numpy()
            for number in self._gradients:
                if phases.wanted[number] == rank:
                    gradient[number] = self._receive(rank, 0, number).numpy()
            for number in self._written:
                if phases.owner[number] == rank:
                    variables[number] = self._receive(rank, 0, number).numpy()
        return Numbers(
            [[passed[microbatch, at] for at in range(len(homes))] for microbatch in range(count)],
            [
                {number: results[number][microbatch].numpy() for number in self._returned}
                for microbatch in range(count)
            ],
            {number: gradient[number] for number in self._gradients},
            {number: variables[number] for number in self._written},
        )

    def _judge(self, split: Numbers, began: float) -> str:
        captured, phases = self._compiled.capture, self._compiled.phases
        operations, variables = captured.record.operations, captured.record.variables
        keys: list[int | None] = [private.key_of(handle) for handle in captured.variables]
        named = [each.name or "a variable of the script" for each in variables]
        names = Names(
            [_name(operations, value.operation) for value in self._passed],
            [phases.partition[value.operation] for value in self._passed],
            {number: named[keys.index(captured.gradients[number])] for number in self._gradients},
            dict(enumerate(named)),
        )
        found = compare(self._one, split, names, precision_of(self._compiled.capture.operations))
        session = self._session
        self._spent_s += time.perf_counter() - began
        self._report(
            {
                "step": session.steps,
                "fault": found.fault,
                "losses": found.losses,
                "gradients": found.gradients,
            }
        )
        if found.fault and not session.settings.verify_report:
            raise VerifyError(f"in step {session.steps} ({self._title}) {found.fault}")
        if not found.fault:
            self._log_proof(found)
        return ""

    def _log_proof(self, found: Findings) -> None:
        one = self._one
        tensors = sum(len(each) for each in one.passed) + sum(len(each) for each in one.returned)
        parts = [
            f"the losses of one process ({len(one.returned)} microbatches, {tensors} tensors, largest difference "
            f"{found.losses:.1e})"
        ]
        if found.gradients is not None:
            parts.append(f"its {len(one.gradients)} gradients ({found.gradients:.1e})")
        if one.variables:
            parts.append(f"what it writes into {len(one.variables)} variables")
        text = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
        log.info("verify: %s gives %s; this took %.2f s", self._title, text, self._spent_s)
        compared = tensors or one.gradients or one.variables
        verdict = "equals one process" if compared else "has nothing to compare with one process"
        self._session.views.opening.proof = f"{self._title} {verdict} ({self._spent_s:.2f} s)"

    def _report(self, row: dict[str, Any]) -> None:
        """Write a line for ``weft verify``."""
        session = self._session
        if session.settings.verify_report and session.rank == 0 and session.steps <= VERIFIED:
            content = {"settings": asdict(session.settings), "framework": "tensorflow", **row}
            with open(session.settings.verify_report, "a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")

    # --- messages -------------------------------------------------------------------------------------------

    def _send(self, microbatch: int, number: int, tensor: Any) -> None:
        assert self._session.channel is not None
        key = Key(READ, self._session.steps, microbatch, number)
        self._session.channel.send(0, Message(key, to_torch(tensor)))

    def _receive(self, peer: int, microbatch: int, number: int) -> Any:
        session = self._session
        assert session.channel is not None
        timeout_s = wait_timeout_s(session.settings)
        key = Key(READ, session.steps, microbatch, number)
        text = f"nothing arrived for {timeout_s:g} s from partition {peer}, for {WHAT}"
        return from_torch(session.channel.mailbox.receive(peer, key, timeout_s, text).payload)


def _name(operations: Sequence[Any], number: int) -> str:
    """The value of an operation, for people: the output of its layer, or the gradient of that."""
    operation = operations[number]
    if operation.gradient_of >= 0:
        return f"the gradient of {_name(operations, operation.gradient_of)}"
    return str(operation.unit.rstrip("*") or operation.name)
