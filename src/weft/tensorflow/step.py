"""``@weft.step``: a training step that runs once for each microbatch, pipelined over the ranks."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.session.cut import Cut
from weft.session.recording import record_preparation, record_units
from weft.tensorflow import private
from weft.tensorflow.delayed_parameters import make_values
from weft.tensorflow.execution.compile import Compiled, compile_phases, compile_step
from weft.tensorflow.execution.executor import Eagerly, InGraph, run
from weft.tensorflow.execution.messages import Messages, compare_calls
from weft.tensorflow.mini_batch import MiniBatch, prepare
from weft.tensorflow.output import Means, StepOutput
from weft.tensorflow.replicas.average import average, broadcast_from_first
from weft.tensorflow.replicas.weights import Weights
from weft.tensorflow.session.session import Session, free_others, session
from weft.tensorflow.split.alike import differing_twins, twins_of, with_twins
from weft.tensorflow.split.phases import EVERYWHERE
from weft.tensorflow.trace import capture
from weft.tensorflow.trace.denominators import NOTHING, watch_losses, weights_of
from weft.tensorflow.trace.returned import Returned, known_of, rows_of, with_rows
from weft.tensorflow.verify.one_process import Proof
from weft.tensorflow.verify.whole_batch import WholeBatch, has_losses

log = logging.getLogger("weft")


class Step:
    """The callable that ``weft.step`` makes. It does not bind as a method, so it may be a class attribute.

    Attributes:
        title: What messages call it, where the script has not written it.
        name: That of its function, which may be a model, or partial.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        cut: Cut,
        input_signature: Any = None,
        autograph: bool = True,
        jit_compile: bool | None = None,
    ) -> None:
        self.function = function
        self.cut = cut
        self.input_signature = input_signature
        self.jit_compile = jit_compile
        self.title = ""
        self.name = getattr(function, "__name__", type(function).__name__)
        self._traced = private.with_autograph(function) if autograph else function
        self._compiled: dict[Any, Compiled] = {}
        self._functions: dict[Any, Any] = {}
        self._training: set[Any] = set()
        self._models: dict[int, Any] = {}
        self._returned: dict[Any, list[Returned]] = {}
        functools.update_wrapper(self, function, updated=())

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.tracing() is not None:
            raise UsageError(f"{self.name}: a step cannot call another step")
        joined = session()
        count = joined.settings.microbatch_count if self.cut.joined.rows else 1
        batch = prepare(self.function, args, kwargs, self.cut, count, self.input_signature)
        xla = private.wants_xla() if self.jit_compile is None else self.jit_compile
        key = self._key(joined, batch, xla)
        tensors = [batch.leaves[number] for number in batch.tensors]
        if joined.place.world_size == 1:
            return self._alone(joined, batch, key, tensors)
        here = private.present_graph()
        compiled = self._compiled.get(key) or self._compiled.get((key, here))
        if compiled is None:
            with joined.failing(), record_preparation(joined):
                compiled = self._compile(joined, batch, xla)
            key = self._key(joined, batch, xla)  # the trace may have built the models
            self._compiled[(key, here) if compiled.bound else key] = compiled
        messages = Messages(joined, self.name, batch, compiled.prove, compiled.proof)
        if private.is_building_function():
            private.keep_from_xla()
            results = self._emit(batch, compiled, InGraph(messages), tensors)
        elif joined.settings.executor == "eager":
            results = self._emit(batch, compiled, Eagerly(messages), tensors)
        else:
            if key not in self._functions:
                self._functions[key] = self._whole(batch, compiled, messages)
            results = self._functions[key](tensors)
        return self._package(joined, batch, compiled, results, batch.shares(tensors))

    def _key(self, joined: Session, batch: MiniBatch, xla: bool) -> Any:
        """The values that must be the same for a step that was traced to be used again.

        Of models only those that it uses: former ones may be freed at other times on other ranks.
        """
        models = joined.models if joined.place.world_size == 1 else self._models.values()
        return batch.key(), joined.settings, xla, tuple(model_state(model) for model in models)

    def _compile(self, joined: Session, batch: MiniBatch, xla: bool) -> Compiled:
        found: list[list[Returned]] = []

        def traced(*tensors: Any) -> Any:
            whole, returned = self._run(batch, tensors)
            found.append(returned)
            return whole

        if joined.channel is not None:
            call = {path: str(spec) for path, spec in zip(batch.paths, batch.specs(), strict=True)}
            text = json.dumps({"step": f"{self.name}, traced anew for other shapes, types or values", **call})
            compare_calls(joined, joined.steps + 1, text).wait_for_all()
        with private.traced_for_xla(xla):
            compiled = compile_step(
                joined, self.name, traced, batch.specs(), batch.microbatches, joined.models
            )
        compiled.number, compiled.returned = joined.number_step(), found[0]
        if any(not model.partitioned for model, _, _ in compiled.capture.marks.models):
            known = {
                unit.name for unit in joined.recorded.units
            }  # of models that an earlier step has called, too
            record_units(joined, [unit for unit in compiled.described() if unit.name not in known])
        self._models |= {id(model): model for model, _, _ in compiled.capture.marks.models}
        used = {private.key_of(handle) for handle in compiled.capture.variables}
        for model in joined.models:
            if any(private.key_of(private.handle_of(each)) in used for each in model.all_variables()):
                self._models[id(model)] = model
        self._add_proof(joined, batch, compiled, xla)
        with tf.init_scope():  # eagerly, also where a graph is being traced
            _finish_models(joined, compiled)
            if xla:
                compile_phases(compiled.cutter, compiled.runnable)
        return compiled

    def _add_proof(self, joined: Session, batch: MiniBatch, compiled: Compiled, xla: bool) -> None:
        """Let the first batch be compared with one process; and its microbatches with the whole of it, if this rank
        has the whole model still."""
        if joined.channel is not None and joined.settings.verify != "off":
            proof = Proof(joined, self.title or self.name, batch, compiled, xla)
            compiled.proof = proof if proof.waits else None
        whole = not any(model.partitioned for model, _, _ in compiled.capture.marks.models)
        wanted = joined.settings.verify != "off" and batch.microbatches > 1
        if whole and wanted and has_losses(compiled.capture):
            title = self.title or self.name
            strict = bool(self.title)
            compiled.prove = WholeBatch(joined, title, self._traced, batch, compiled.capture, strict).prove

    def _run(self, batch: MiniBatch, tensors: Sequence[Any]) -> tuple[Any, list[Returned]]:
        """The result of a microbatch, with its masks, what its losses are divided by, the places of its rows and the
        shapes of their wholes; and what is known of each tensor of it."""
        args, kwargs = batch.arguments(tensors)
        with watch_losses() as losses:
            result = self._traced(*args, **kwargs)
        leaves = tf.nest.flatten(result)
        reductions = [losses.of(leaf) if batch.microbatches > 1 else None for leaf in leaves]
        masks = [private.mask_of(leaf) for leaf in leaves]
        values, places, shapes = zip(*map(rows_of, leaves), strict=True) if leaves else ((), (), ())
        known = list(map(known_of, places, shapes, reductions))
        result = tf.nest.pack_sequence_as(result, values)
        denominators = [each and each.denominator for each in reductions]
        open_shapes = [
            shape if each.shape is None else None for each, shape in zip(known, shapes, strict=True)
        ]
        return (result, masks, denominators, list(places), open_shapes), known

    def _emit(self, batch: MiniBatch, compiled: Compiled, way: Any, tensors: list[Any]) -> list[list[Any]]:
        feeds = [compiled.feeds(part) for part in batch.slices(tensors)]
        return run(compiled.runnable, feeds, way, tensors)

    def _whole(self, batch: MiniBatch, compiled: Compiled, messages: Messages) -> Any:
        """The step as a function of its own, for calls outside of a ``tf.function``."""

        @tf.function(autograph=False)
        def whole(tensors: list[Any]) -> list[list[Any]]:
            return self._emit(batch, compiled, InGraph(messages), tensors)

        return whole

    def _alone(self, joined: Session, batch: MiniBatch, key: Any, tensors: list[Any]) -> Any:
        """A single process: the function once for each microbatch.

        XLA compiles no calls of Python: a step in a function that it compiles is not counted.
        """
        messages = Messages(joined, self.name, batch)
        shares = batch.shares(tensors)
        if not private.is_building_function():
            messages.open()
            results = self._one_function(batch, key, tensors)
            messages.close(key not in self._training, tensors)
        elif private.wants_xla():
            results = self._inside(batch, key, tensors)
        else:
            opened = _operation(messages.open)
            with tf.control_dependencies([opened]):
                results = self._inside(batch, key, tensors)
            evaluates = key not in self._training
            done = [each for each in tf.nest.flatten(results) if tf.is_tensor(each)]
            with tf.control_dependencies(done):
                _operation(lambda *given: messages.close(evaluates, given), tensors)
        return _collect(shares, results, self._returned[key])

    def _inside(self, batch: MiniBatch, key: Any, tensors: list[Any]) -> list[Any]:
        """The results of the microbatches, in a graph that is being traced."""
        run = self._one_function if self.jit_compile else self._microbatches
        return run(batch, key, tensors)

    def _one_function(self, batch: MiniBatch, key: Any, tensors: list[Any]) -> list[Any]:
        """The results of the microbatches, from a function that holds all of them."""
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda given: self._microbatches(batch, key, given),
                autograph=False,
                jit_compile=self.jit_compile,
            )
        return list(self._functions[key](tensors))

    def _microbatches(self, batch: MiniBatch, key: Any, tensors: list[Any]) -> list[Any]:
        results = []
        with private.watch_asked(lambda *asked: self._training.add(key)):
            for part in batch.slices(tensors):
                result, self._returned[key] = self._run(batch, part)
                results.append(result)
        return results

    def _averages(self, key: Any, kind: Returned) -> bool:
        """True if the mean of a number over the replicas is taken: of gradients, and of what `fit` shows.

        Replicas may evaluate other numbers of batches. So `evaluate` asks no other replica for the sum of its weights.
        """
        adds_up = kind.reduction is not None and kind.reduction.kind == NOTHING
        return key is not None or self.title == "fit" or (self.title == "evaluate" and adds_up)

    def _package(
        self,
        joined: Session,
        batch: MiniBatch,
        compiled: Compiled,
        results: list[list[Any]],
        shares: list[Any],
    ) -> Any:
        """The result of the step: gradients of other partitions' variables are left out of their lists."""
        captured, own = compiled.capture, joined.position("pp")
        means = (
            Means(lambda tensors: average(tensors, joined, compiled.number)) if joined.mesh.rdp > 1 else None
        )
        weights = Weights(joined, shares)
        leaves: list[Any] = []
        flat = tf.nest.flatten(captured.result[0])
        for number, leaf in enumerate(flat):
            masks, denominators, places, shapes = (results[at * len(flat) + number] for at in (1, 2, 3, 4))
            kind = compiled.returned[number]
            key = captured.gradients[number]
            owner = EVERYWHERE if key is None else compiled.owners.get(key, EVERYWHERE)
            if owner not in (own, EVERYWHERE):
                leaves.append(ELSEWHERE)
            elif captured.record.results[number] is None:
                leaves.append([leaf] * batch.microbatches if leaf is not None else None)
            else:
                entries = _entries(results[number], masks, places, shapes, kind)
                weigh = weights.of_all if self._averages(key, kind) else weights.of_replica
                leaves.append(
                    StepOutput(
                        entries, weigh(kind.reduction, denominators), key, None if key is None else means
                    )
                )
        return _without_others(captured.result[0], iter(leaves))


def _operation(call: Callable[..., object], tensors: Sequence[Any] = ()) -> Any:
    """An operation of the graph that is being traced, which calls Python with the values of tensors."""
    return private.call_in_order(lambda *given: (call(*given), 0)[1], list(tensors), tf.int32)


def _entries(
    values: Sequence[Any], masks: Sequence[Any], places: Sequence[Any], shapes: Sequence[Any], kind: Returned
) -> list[Any]:
    """One tensor of the result for each microbatch, from its parts."""
    return [
        private.with_mask(with_rows(value, place, shape, kind), mask)
        for value, mask, place, shape in zip(values, masks, places, shapes, strict=True)
    ]


def _collect(shares: list[Any], results: list[Any], returned: list[Returned]) -> Any:
    """The results of the microbatches, as one structure."""
    flat = [tf.nest.flatten(result) for result, *_ in results]
    leaves = []
    for number, kind in enumerate(returned):
        values = [each[number] for each in flat]
        masks, denominators, places, shapes = ([each[at][number] for each in results] for at in (1, 2, 3, 4))
        entries = _entries(values, masks, places, shapes, kind)
        leaves.append(_entry(entries, weights_of(kind.reduction, denominators, shares)))
    return tf.nest.pack_sequence_as(results[0][0], leaves)


def _finish_models(joined: Session, compiled: Compiled) -> None:
    """Give the models of the step the places of their variables; all replicas begin with the same values."""
    used = list({id(model): model for model, _, _ in compiled.capture.marks.models}.values())
    new = [model for model in used if model.placement is None]
    owners = with_twins(compiled.owners, joined.models if joined.settings.auto_partition else ())
    known = [*used, *twins_of(used, joined.models, owners)]
    make_values(known, compiled.capture.variables, owners)
    for model in known:
        model.finish_partition(owners, compiled.placement if model in used else None)
    if joined.settings.partitions > 1:
        free_others(known)
        if new and joined.rank == 0:
            for reason in differing_twins(joined.models, new):
                log.warning("%s", reason)
    if new and compiled.placement is not None:
        names = " and ".join(type(model).__name__ for model in new)
        joined.views.opening.add(names, compiled.placement)
        if joined.rank == 0:
            log.info("Partition assignments of %s:\n%s", names, compiled.placement.tables())
            if compiled.decision.reasons:
                log.info("Placements by their simulated steps:\n%s", compiled.decision.reasons)
            for warning in compiled.placement.warnings:
                log.warning("%s", warning)
    for model in new:
        if joined.mesh.rdp > 1:
            broadcast_from_first(model.variables, joined)


class _Elsewhere:
    def __repr__(self) -> str:
        return "<the gradient of a variable of another partition>"


ELSEWHERE = _Elsewhere()
"""Stands for a gradient of another partition's variable until it is left out."""


def _without_others(structure: Any, leaves: Any) -> Any:
    """The structure with these leaves; lists, tuples and dicts without the gradients of other partitions."""
    if isinstance(structure, dict):
        named = {key: _without_others(structure[key], leaves) for key in sorted(structure)}
        return type(structure)((key, named[key]) for key in structure if named[key] is not ELSEWHERE)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_without_others(item, leaves) for item in structure))
    if isinstance(structure, (list, tuple)):
        items = [_without_others(item, leaves) for item in structure]
        return type(structure)(item for item in items if item is not ELSEWHERE)
    return next(leaves)


def _entry(entries: list[Any], weights: list[float]) -> Any:
    if all(tf.is_tensor(entry) or isinstance(entry, tf.IndexedSlices) for entry in entries):
        return StepOutput(entries, weights)
    return None if all(entry is None for entry in entries) else entries


def model_state(model: Any) -> tuple[Any, ...]:
    """The part of a model's state that a traced step depends on: which variables are trained."""
    try:
        return tuple(each.trainable for each in model.all_variables())
    except ValueError:  # a model of tf_keras that is not built
        return ()


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    allow_uneven: bool = False,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    **ignored: Any,
) -> Any:
    """Mark a function as one step of training, or of evaluation if it takes no gradients.

    Each call cuts the tensors among its arguments into ``microbatches`` slices along dim 0 and runs the function once
    for each, pipelined. Tensors that it returns become :class:`StepOutput`, other values lists. Like a ``tf.function``
    it is traced anew for other shapes, types and Python values.

    ``non_split_inputs``: names of arguments that go whole to every microbatch. ``input_split_axes``: the dim to cut
    along, by name, where it is not 0. ``allow_uneven``: a mini-batch that ``microbatches`` does not divide is cut as
    evenly as possible instead of being an error. ``input_signature``: the types and shapes of the whole mini-batch, as
    ``tf.function`` takes them. ``autograph``: whether Python's conditions over tensors become operations.
    ``jit_compile``: whether XLA compiles what each rank computes between messages; by default where XLA shall compile
    the ``tf.function`` around.
    """
    if "tokens" in ignored:
        raise UsageError(
            "tokens= cuts steps of PyTorch: leave it out, with TensorFlow batches are cut into rows"
        )
    cut = Cut(tuple(non_split_inputs), dict(input_split_axes or {}), allow_uneven)
    if function is None:
        return lambda real: Step(real, cut, input_signature, autograph, jit_compile)
    return Step(function, cut, input_signature, autograph, jit_compile)


__all__ = ["Step", "step"]
