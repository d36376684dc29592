"""``@weft.step``: a training step that runs once for each microbatch, pipelined over the ranks."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from weft.errors import SplitError, UsageError
from weft.runtime.microbatch import Visits
from weft.schedule.order import Order
from weft.session.cut import Cut, Joined, Tokens
from weft.session.recording import record_forward, record_preparation, record_step
from weft.session.watching import show_opening
from weft.torch import watching
from weft.torch.agreement import follow_first_rank
from weft.torch.calls.placeholders import Gradients
from weft.torch.execution.chunked_loss import defer_heads
from weft.torch.execution.thread_settings import current_scale, in_microbatch, trains
from weft.torch.interceptions import install
from weft.torch.model import DistributedModel, agree_on_size
from weft.torch.output import collect
from weft.torch.placed import changes
from weft.torch.replicas.sharding.order import CASTS_SHARES
from weft.torch.replicas.steps import begin_step, finish_step
from weft.torch.replicas.sync_batch_norm import warn_of_few_samples
from weft.torch.session import current
from weft.torch.session.divergence import compare_start, describe_call, describe_inputs
from weft.torch.session.session import Session
from weft.torch.step_run import StepRun
from weft.torch.tensor_parallel.samples import with_samples_of_all
from weft.torch.tensors.deferred_logits import settle, settled
from weft.torch.tensors.mini_batch import MiniBatch, prepare, refuse_elsewhere, shares_of, told_of_devices
from weft.torch.tensors.pytree import map_tensors
from weft.torch.verify import compare
from weft.torch.verify.whole_batch import Rows

READS_SHARES = (
    "code outside of a layer computes with its weight, of which this replica has a share between calls "
    "(sharded_data_parallel_degree): let the layer's own forward do it and return the result, let the optimizer do it "
    "(weight_decay, say), or leave sharded_data_parallel_degree out"
)
WITH_SHARES = {
    "got mixed torch.Tensor and DTensor": READS_SHARES,
    "does not have a sharding strategy": READS_SHARES,
    "expects uniform gradient dtype": CASTS_SHARES,
}
"""Words of PyTorch's errors where replicas share parameters, and what they mean."""

log = logging.getLogger("weft")
Results = tuple[list[Any], list[float]]
"""Of the microbatches, and their weights."""


class Step:
    """The callable that ``weft.step`` makes. It does not bind as a method, so it may be a class attribute."""

    def __init__(
        self, function: Callable[..., Any], cut: Cut, detach_outputs: bool,
        weight: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.function = function
        self.weight = weight
        self._asked = cut.tokens, weight
        self._proved: list[weakref.ref[DistributedModel]] = []
        self.name = getattr(function, "__qualname__", type(function).__name__)  # a model has none
        self.rows = Rows(self.name, self)
        self._trains = self._ran = self._warned = False
        self.cut = cut
        self.detach_outputs = detach_outputs
        self._orders: dict[Any, Order] = {}
        self.latest: int | None = None
        """After how many backward passes a microbatch has still called a module with buffers, if any step has run."""
        self.visits = Visits()
        """The numbers of calls, in a microbatch, of each module with buffers."""
        self._units: tuple[int, ...] = ()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = current.session()
        if session.tracing or in_microbatch():
            raise UsageError(f"{self.name}: a step cannot call another step")
        batch = self._prepare(session, args, kwargs)
        if session.settings.inputs == "per_rank" and session.mesh.tp > 1:
            args, kwargs = with_samples_of_all(session, batch)
            batch = self._prepare(session, args, kwargs)
        if batch.fault and self._trains:
            raise SplitError(batch.fault)
        if session.rehearsal is not None:
            return session.rehearsal.step(session, self.function, batch, self.weight is not None)
        with record_step(session, lambda: (batch.size or 0, watching.peak_bytes(session))):
            try:
                collected = self._run(session, batch)
            except RuntimeError as error:
                if text := told_of_devices(error, batch, session.device):
                    raise UsageError(text) from error
                raise
        if self._trains:
            session.went_backward = True
            Gradients.passes += 1
            watching.after_step(session, batch.size, collected)
        return collected

    def _prepare(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MiniBatch:
        cut = replace(self.cut, joined=self.rows.like.cut.joined)
        batch = prepare(self.function, args, kwargs, cut, _count(session))
        if session.settings.inputs in ("equal", "per_rank") or session.position("pp") == 0:
            refuse_elsewhere(batch, session.device)
        if batch.notice and not self._warned and session.rank == 0:
            log.warning("%s: %s", self.rows.title, batch.notice)
        self._warned |= bool(batch.notice)
        return batch

    def _run(self, session: Session, batch: MiniBatch) -> Any:
        """Runs the step; its result."""
        install()
        pending = _not_split(session)
        batch = self._split(session, pending, batch)
        batch = self._judge_rows(session, pending, batch)
        batch = self._decide_number(session, batch)
        batch = self._weigh(session, batch)
        self._look_at_models(session, batch)
        if session.rebalance is not None:
            session.rebalance.look(session)
        proof = self._put_in_place(session, pending, batch)
        results = self._compute(session, batch, proof)
        self._conclude(session, batch)
        return collect(*results, batch.groups)

    def _split(self, session: Session, pending: list[DistributedModel], batch: MiniBatch) -> MiniBatch:
        """The batch, after models that are not split yet are, and before the first step all have the same weights."""
        if pending:
            with record_preparation(session):
                return self._partition(session, pending, batch)
        if not session.agreement.begun:
            follow_first_rank(session, [model for model in session.models if not model.sharded])
        return batch

    def _judge_rows(self, session: Session, pending: list[DistributedModel], batch: MiniBatch) -> MiniBatch:
        """The batch with rows that the loss joins in one microbatch, where no split of a model has seen to that."""
        whole = session.pipeline is None and not any(model.sharded for model in session.models)
        if self._asked[0] is not None:
            return self._keep_joined_rows(session, session.models, batch, everybody=True)
        if whole and not (pending or self._ran):
            everybody = self.rows.trainer or (session.settings.microbatches == "auto" and _may_train(session))
            return self._keep_joined_rows(session, session.models, batch, everybody)
        if self.rows.trainer and not pending and not self.rows.like.rows.judged:
            return self._keep_joined_rows(session, session.models, batch, everybody=True)
        return batch

    def _decide_number(self, session: Session, batch: MiniBatch) -> MiniBatch:
        """The batch in as many microbatches as fit, where that is still to be decided."""
        if session.settings.microbatches != "auto" or not _may_train(session):
            return batch
        from weft.torch.split.accumulation import accumulate  # here: many jobs split nothing

        with record_preparation(session):
            return accumulate(session, self.function, batch)

    def _look_at_models(self, session: Session, batch: MiniBatch) -> None:
        """The script's hooks run, and what it has changed in its models since the last step is found."""
        for model in session.models:
            model.run_partition_hooks()
        changes.look(session)
        for model in session.models:
            warn_of_few_samples(session, model, batch)

    def _put_in_place(
        self, session: Session, pending: list[DistributedModel], batch: MiniBatch
    ) -> compare.Proof | None:
        """The proof of the step, if there is one; it has seen the models whole, which hold only their parts now."""
        with record_preparation(session):
            for model in session.models:
                if not model.sharded:
                    defer_heads(model, session.settings.chunked_loss)
            proof = compare.begin(session, pending, self.function, batch)
            for model in pending:
                model.cut_tensors()
                model.share_experts()
                model.share_parameters()
                model.offload_weights()
            if pending and session.executor is not None:
                session.share_turns(max(model.lockstep_degree for model in session.models))
            if session.device.type == "cpu":
                session.growth.look()
                session.huge_pages.look()
        return proof

    def _compute(self, session: Session, batch: MiniBatch, proof: compare.Proof | None) -> Results:
        """The results of the microbatches, and their weights; gradients are those of all replicas."""
        session.agreement.begin_step()
        begin_step(session, batch.microbatches)
        if session.activations is not None:
            session.activations.begin(model.module for model in session.models)
        if session.pipeline is None:
            results = self._alone(session, batch)
        else:
            results = self._pipelined(session, batch, proof)
        session.agreement.end_step()
        return results

    def _conclude(self, session: Session, batch: MiniBatch) -> None:
        """The step is announced and compared, and the script's hooks run."""
        settle()
        show_opening(session, batch.microbatches)
        self._ran = True
        for model in session.models:
            model.run_step_hooks()
        compare.end(session)

    def _partition(self, session: Session, pending: list[DistributedModel], batch: MiniBatch) -> MiniBatch:
        """Split the models that are not yet; collective over all ranks. The batch with the microbatches that it has."""
        from weft.torch.split.partition_models import partition_models

        for model in pending:
            model.move(session.device)
        if not session.recorded.units:
            held = sum(model.held_bytes() for model in pending)
            session.recorded.note_base(watching.memory_bytes(session) - held)
        name = self.name
        compare_start(session, pending, describe_call(name, batch, True), describe_inputs(name, batch))
        agree_on_size(session, pending)
        session.proofs.unproved = compare.reason_against(session, pending)
        session.proofs.by_unit = compare.needs_parts(pending)
        follow_first_rank(session, pending)
        batch = self._keep_joined_rows(session, pending, batch, everybody=True)
        return partition_models(session, pending, self.function, batch, counted=self.weight is not None)

    def keep_rows(self, title: str, like: Step | None = None, reorders: bool = False) -> None:
        """For a step of a trainer, called ``title``: let rows that its loss joins be in one microbatch.

        ``like``: the step that shows which rows those are, as the one that trains does. ``reorders``: rows of one
        microbatch need not be neighbours; the trainer puts what the step returns in order again.
        """
        self.rows = Rows(title, like or self, True, reorders)
        self.cut = replace(self.cut, adapts=True)

    def _keep_joined_rows(
        self, session: Session, models: list[DistributedModel], batch: MiniBatch, everybody: bool
    ) -> MiniBatch:
        """The batch cut by tokens, or so that rows which the loss joins are in one microbatch, or else a warning."""
        tokens, weight = self._asked
        if tokens is not None and [known() for known in self._proved] != session.models:
            from weft.torch.verify.token_cut import prove  # here: few steps are cut so

            self.cut = replace(self.cut, tokens=tokens)
            batch = self._prepare(session, batch.args, batch.kwargs)
            proved, self.weight = prove(session, models, self.function, self.rows.title, batch, weight)
            self.cut = replace(self.cut, tokens=proved)
            self._proved = [weakref.ref(model) for model in session.models]
            return self._prepare(session, batch.args, batch.kwargs)
        if session.settings.verify == "off" or not models or tokens is not None:
            return batch
        joined = self.rows.judge(session, models, batch, everybody)
        if joined == Joined():
            return batch
        trains = self.rows.like
        trains.cut = replace(trains.cut, joined=joined)
        return self._prepare(session, batch.args, batch.kwargs)

    def _evaluates(self, session: Session) -> bool:
        """True if this call has no backward pass, as far as that is known before it runs."""
        if self._trains or not torch.is_grad_enabled():
            return not torch.is_grad_enabled()
        return self._ran or not any(model.training for model in session.models)

    def _weigh(self, session: Session, batch: MiniBatch) -> MiniBatch:
        """The batch with what the step's ``weight`` says; where the first rank's inputs count it says so there."""
        if self.weight is None:
            return batch
        if any(not model.averages for model in session.models):
            raise UsageError(
                "weight= or tokens= says what microbatches weigh in a mean, but average_grads_across_microbatches="
                "False or a communication hook adds their gradients up: leave one of the two out"
            )
        if session.first_inputs and session.position("pp"):
            return batch
        return replace(batch, shares=shares_of(self.weight, batch))

    def _alone(self, session: Session, batch: MiniBatch) -> Results:
        """One partition: plain accumulation over microbatches; their results, and their weights."""
        session.count_step(self._evaluates(session))
        session.monitor.note("", session.steps)
        results, trained = [], False
        offloading = nullcontext if session.activations is None else session.activations.all
        for index in range(batch.microbatches):
            args, kwargs = batch.slice(index)
            with (
                current_scale(batch.weight(index), batch.fault),
                record_forward(session, index),
                offloading(),
            ):
                try:
                    result = self.function(*args, **kwargs)
                except (AssertionError, RuntimeError) as error:
                    meaning = next((text for words, text in WITH_SHARES.items() if words in str(error)), None)
                    if meaning is not None and any(model.sharded for model in session.models):
                        raise UsageError(meaning) from error
                    raise
                trained |= trains()
            result = map_tensors(result, settled, attributes=True)
            if self.detach_outputs:
                result = map_tensors(result, lambda t: t.detach(), attributes=True)
            results.append(result)
        self._trains |= trained
        finish_step(session, trained)
        return results, batch.weights()

    def _pipelined(self, session: Session, batch: MiniBatch, proof: compare.Proof | None) -> Results:
        """The results of the microbatches, and their weights."""
        assert session.pipeline is not None
        session.check_whole()
        session.count_step(self._evaluates(session))
        order = self._order(session, batch.microbatches)
        units = id(session.pipeline), session.pipeline.generation, session.pipeline.units
        if self._units != units:  # others, or elsewhere
            self._units, self.latest, self.visits = units, None, Visits()
        run = StepRun(
            self.name, self.function, self.detach_outputs, self.latest, self.visits, session, batch, order
        )
        results = run.run(proof)
        self._trains |= run.trained
        if session.rebalance is not None and run.trained:
            session.rebalance.add(session, self.name)
        self.latest = max(self.latest or 0, *run.latest)
        session.pipeline.channel.mailbox.discard(session.steps, session.pipeline.generation)
        session.monitor.note("", session.steps)
        finish_step(session, run.trained)
        if session.decided.watch is not None:
            session.decided.watch.add(session, run.took_s, batch.microbatches)
        return results, run.batch.weights()

    def _order(self, session: Session, microbatches: int) -> Order:
        settings, chosen = session.settings, session.decided.chosen
        # without a backward pass nothing is held for one, and a step that generates text comes back to all partitions
        revisited = not torch.is_grad_enabled() or any(
            model.plan is not None and model.plan.revisits for model in session.models
        )
        key = (settings, chosen, microbatches, revisited)
        if key not in self._orders:
            from weft.plan.chosen import order_for

            self._orders[key] = order_for(settings, chosen, microbatches, session.position("pp"), revisited)
        return self._orders[key]


def _not_split(session: Session) -> list[DistributedModel]:
    """The models that are still to be split, without those of several that the script has let go of."""
    if len(session.models) > 1 and any(not model.partitioned for model in session.models):
        gc.collect()  # those may be part of a cycle
    return [model for model in session.models if not model.partitioned]


def _may_train(session: Session) -> bool:
    """True if a step may have a backward pass, as far as is known before it runs."""
    return torch.is_grad_enabled() and any(model.training for model in session.models)


def _count(session: Session) -> int:
    """Into how many microbatches to cut; 1 where that is decided when the models are split."""
    if session.settings.microbatches == "auto":
        split = session.models and all(model.partitioned for model in session.models)
        if not split or session.settings.partitions == 1:
            return 1  # until a step trains
        session.decide(microbatches=session.decided.last_number)  # that of the models
    return session.settings.microbatch_count


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    allow_uneven: bool = False,
    weight: Callable[..., Any] | None = None,
    tokens: str | Callable[..., Any] | None = None,
    **ignored: Any,
) -> Any:
    """Mark a function as one step of training, or of evaluation if it calls no ``backward``.

    Each call cuts the tensors among its arguments into ``microbatches`` slices along dim 0 and runs the function once
    for each, pipelined. Tensors that it returns become :class:`StepOutput`, other values lists.

    ``non_split_inputs``: names of arguments that go whole to every microbatch. ``input_split_axes``: the dim to cut
    along, by name, where it is not 0. ``detach_outputs``: returned tensors carry no graph. ``allow_uneven``: a
    mini-batch that ``microbatches`` does not divide is cut as evenly as possible instead of being an error; gradients
    and ``reduce_mean`` are still those of the whole batch's mean. A batch with fewer samples than microbatches gets
    fewer microbatches. Evaluation steps do not need ``allow_uneven``. ``weight``: a function of the same arguments that
    says how much a microbatch counts, the tokens of its loss say; microbatch i then weighs n_i / (n_1 + ... + n_m) in
    gradients and in ``reduce_mean``. ``tokens``: the argument, or entry of a dict, with the mask of padded rows, or a
    function of the arguments that gives a mask; rows of like length then make a microbatch, without their padding.
    """
    if tokens is not None and input_split_axes:
        raise UsageError("tokens= cuts rows, which are dim 0: leave tokens= or input_split_axes= out")
    cut = Cut(tuple(non_split_inputs), dict(input_split_axes or {}), allow_uneven)
    cut = cut if tokens is None else replace(cut, tokens=Tokens(tokens))
    if function is None:
        return lambda real: Step(real, cut, detach_outputs, weight)
    return Step(function, cut, detach_outputs, weight)


__all__ = ["DistributedModel", "Step", "step"]
