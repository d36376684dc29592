"""One step over a pipeline, as this rank runs it: its microbatches, their results, and what ranks compare meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.errors import PeerError
from weft.runtime.executor import Checks
from weft.runtime.lockstep import LockstepOrder
from weft.runtime.microbatch import Microbatch, Visits
from weft.schedule.order import Order
from weft.session.recording import record_first
from weft.session.step_check import StepCheck
from weft.torch.execution.first_rank_inputs import from_first
from weft.torch.execution.glue import Glue
from weft.torch.execution.program import Program
from weft.torch.execution.step_results import Returned
from weft.torch.execution.thread_settings import ThreadContext, current_scale, trains
from weft.torch.session.differing_calls import CallCheck
from weft.torch.session.divergence import describe_call, describe_inputs, follow_first
from weft.torch.session.random_streams import mix
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.verify.compare import Proof


class StepRun:
    """One step over a pipeline, as this rank runs it: what belongs to that step alone.

    Args:
        name: The step's, for errors.
        function: Runs for each microbatch.
        detach_outputs: Returned tensors carry no graph.
        expected: After how many backward passes a microbatch of the last step has still called a module with buffers,
            if any step has run.
        visits: How often microbatches call each module with buffers.

    Attributes:
        batch: The mini-batch; what its microbatches weigh is what the pipeline's first rank says.
        latest: Of each microbatch that has run, after how many backward passes it has still called a module with
            buffers.
        took_s: How long the microbatches took together.
        trained: True if a microbatch had a backward pass.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], detach_outputs: bool, expected: int | None, visits: Visits,
        session: Session, batch: MiniBatch, order: Order,
    ) -> None:  # fmt: skip
        assert session.executor is not None and session.pipeline is not None
        self._name, self._function, self._expected, self._visits = name, function, expected, visits
        self._session, self._order = session, order
        self._pipeline, self._executor = session.pipeline, session.executor
        self.batch = batch
        self.latest: list[int] = []
        self.took_s = 0.0
        self.trained = False
        self._context = ThreadContext()
        self._pipeline.channel.stream = self._context.stream
        self._states_before = session.streams.capture()
        self._own_seed = session.streams.draw()
        self._states_after = session.streams.capture()
        self._drew = False
        """True once a microbatch has drawn a random number."""
        peers = session.peers("pp")
        self._check = StepCheck(
            self._pipeline.channel, peers, session.position("pp"), session.steps, self._call(),
            self._executor.wait_timeout_s, session.agreement.settings(),
        )  # fmt: skip
        self._calls = CallCheck(self._pipeline, peers, session.steps)
        self._returned = Returned(batch.microbatches, detach_outputs, self._calls)
        self._serial = any(model.plan is not None and model.plan.serial for model in session.models)

    def _call(self) -> str:
        """A description of the step's call, as far as all ranks of the pipeline have it in common."""
        session, name = self._session, self._name
        if session.first_inputs:
            return describe_inputs(name, self.batch, session.changes)
        return describe_call(name, self.batch, session.settings.checked == "always", session.changes)

    def _turns(self) -> list[LockstepOrder]:
        """Those of ranks that take the same turns, and of ranks that split tensors, where they are not the same."""
        both = (self._executor.turns, self._session.tensor.turns)
        return [*dict.fromkeys(turns for turns in both if turns is not None)]

    def _agreed(self, own: list[Any]) -> list[Any]:
        """The same for all ranks that split tensors; these, and others, take the same turns in this step."""
        session = self._session
        for turns in self._turns():
            turns.begin(session.steps)
        if session.mesh.tp == 1:
            return own
        agreed: list[Any] = follow_first(session, own, self._call(), session.steps)
        return agreed

    def run(self, proof: Proof | None) -> list[Any]:
        """The results of the microbatches. ``proof``: compares the step with one process."""
        session, pipeline = self._session, self._pipeline
        pipeline.begin_step()
        try:
            session.monitor.note("wait", session.steps, peer=session.peers("pp")[0])
            with record_first(session):
                seed, shares = self._check.begin(self._agreed([self._own_seed, self.batch.shares]))
            pipeline.seed = seed
            self.batch = replace(self.batch, shares=shares)
            began_s = time.perf_counter()
            checks = Checks(self._check.look, self._calls.look)
            results = self._executor.run([self._body] * self.batch.microbatches, self._order, checks)
            for turns in self._turns():
                turns.end()
            for model in session.models:
                model.all_reduce_weights()
            self.took_s = time.perf_counter() - began_s
            results = self._returned.whole(results)
            if proof is not None:
                proof.conclude(results)
            pipeline.forget_old_calls()
        except BaseException as error:
            session.break_off(error)
            if not isinstance(error, PeerError):
                for channel in filter(
                    None, (pipeline.channel, session.tensor.channel, session.turns.channel)
                ):
                    channel.abort(session.broken)
            raise
        finally:
            pipeline.logs.clear()
            pipeline.end_draws(self._states_after if self._drew else self._states_before)
        pipeline.end_step()
        self._visits.new = False
        return results

    def _body(self, microbatch: Microbatch) -> Any:
        """The result of one microbatch; on a thread of its own."""
        microbatch.expected, microbatch.visits = self._expected, self._visits
        if self._serial:
            microbatch.follow_whole()
        result = self._run_microbatch(microbatch)
        self.latest.append(microbatch.latest)
        self._visits.end(microbatch.times)
        if self._pipeline.own:
            self._pipeline.own.leave(microbatch.index, self._pipeline.rank)
        return result

    def _run_microbatch(self, microbatch: Microbatch) -> Any:
        session, batch, index = self._session, self.batch, microbatch.index
        program = Program(
            self._pipeline,
            microbatch,
            session.steps,
            self._pipeline.seed,
            batch.weight(index),
            self._order.splits(index),
        )
        args, kwargs = batch.slice(index)
        program.checkpointing = session.decided.chosen is not None and session.decided.chosen.option.recompute
        with self._context.enter(), current_scale(batch.weight(index), batch.fault), Glue(program) as glue:
            if session.first_inputs:
                with glue.lifted():
                    args, kwargs = from_first(program, (args, kwargs))
            result = self._function(*args, **kwargs)
            self.trained |= trains()
            with glue.lifted():
                drawn = bool(program.drawn) or session.streams.has_drawn_since(mix(program.seed, index))
                self._drew |= drawn
                result = self._returned.deliver(program, result)
        program.close()
        return result
