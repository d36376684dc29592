"""Hugging Face's Trainer with a split model: its own steps, one microbatch at a time.

The Trainer has code for split models that calls the model and takes its loss, whatever the script says about losses.
Here the Trainer's ordinary ``training_step`` and ``prediction_step``, or those of a class made from it, run inside a
weft step instead: ``compute_loss``, a loss function, label smoothing and the like mean what they mean in one process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType, ModuleType
from typing import Any

from weft.compat.hf import files, options
from weft.compat.modelparallel.session import state

IGNORED = -100
"""The label of a token that no loss counts, everywhere in the library."""

NEEDED = (
    "_save_rng_state",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_best_model",
)
_here = threading.local()
log = logging.getLogger("weft")


def install(trainer: Any) -> None:
    """Change ``transformers.trainer.Trainer``, as far as ``smp.init()`` has been called when it is used."""
    cls = trainer.Trainer
    if not all(hasattr(cls, name) for name in NEEDED):
        options.refuse_older(cls, trainer.is_sagemaker_mp_enabled)
        return
    _end_unwrapping(trainer)
    split = trainer.is_sagemaker_mp_enabled
    trainer.is_sagemaker_mp_enabled = lambda: split() and not getattr(_here, "inside", False)
    options.install(trainer)
    files.install(trainer, _inside)
    _count_once(cls)
    _wrap_for_steps(trainer, cls, makes_optimizer=hasattr(cls, "_prepare_for_training"))


def _end_unwrapping(trainer: ModuleType) -> None:
    """Let older versions' ``unwrap_model`` end at a model that is its own ``module``, as wrapped ones are here."""

    def unwrap_model(model: Any) -> Any:
        inner = getattr(model, "module", model)
        return model if inner is model else unwrap_model(inner)

    for module in (trainer, importlib.import_module("transformers.modeling_utils")):
        known = getattr(module, "unwrap_model", None)
        if known is not None and len(inspect.signature(known).parameters) == 1:
            vars(module)["unwrap_model"] = unwrap_model


def _wrap_for_steps(trainer: ModuleType, cls: Any, makes_optimizer: bool) -> None:
    """Give the Trainer its steps when the model is wrapped.

    Older Trainers make the optimizer of a split model by themselves, those from version 5 on forget it.
    """
    wrap = cls._wrap_model

    @functools.wraps(wrap)
    def wrap_model(self: Any, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not state.initialized or not trainer.is_sagemaker_mp_enabled():
            return wrap(self, model, training, *args, **kwargs)
        from weft.compat.modelparallel.model import DistributedModel
        from weft.compat.modelparallel.optimizer import DistributedOptimizer
        from weft.torch.session.current import session

        if isinstance(model, DistributedModel):
            wrapped = model
        else:
            options.choose_microbatches()
            wrapped = DistributedModel(
                model,
                bucket_cap_mb=self.args.ddp_bucket_cap_mb,
                broadcast_buffers=self.args.ddp_broadcast_buffers,
            )
        if self.accelerator.mixed_precision not in (None, "no") and "forward" not in vars(wrapped):
            self.accelerator.prepare_model(wrapped, device_placement=False, evaluation_mode=True)
        if "training_step" not in vars(self):
            made = _Steps(self, session().settings.trainer_tokens)
            session().views.progress = None  # the Trainer has its own
            self.training_step, self.prediction_step = made.train, made.predict
        if makes_optimizer and training and not isinstance(self.optimizer, DistributedOptimizer):
            self.create_optimizer()
        return wrapped

    cls._wrap_model = wrap_model


def _count_once(cls: Any) -> None:
    """The items of an evaluation: in a microbatch its part of the batch's, which have been counted over replicas."""
    count = getattr(cls, "_get_num_items_in_batch", None)
    if count is None:
        return

    @functools.wraps(count)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _here.items[0] if inside() and _here.items else count(self, *args, **kwargs)

    cls._get_num_items_in_batch = counted


class _Steps:
    """The methods that a Trainer calls for a batch, in place of its own; ``tokens``: the setting ``trainer_tokens``."""

    def __init__(self, trainer: Any, tokens: str) -> None:
        from weft.torch import step

        self.trainer = trainer
        self.concat = importlib.import_module("transformers.trainer_pt_utils").nested_concat
        self.own_loss = not type(trainer).compute_loss.__module__.startswith(("transformers.", "trl."))
        self.ratios: set[float] = set()
        self.shifted = bool(getattr(trainer, "_loss_shifts_labels", _is_causal(trainer)))
        train, predict = (MethodType(each, trainer) for each in (_train_microbatch, _predict_microbatch))
        self._train = step(
            train, non_split_inputs=["items"], allow_uneven=True, weight=self._count, tokens=tokens or None
        )
        self._predict = step(
            predict, non_split_inputs=["items", "loss_only", "ignored"], allow_uneven=True, weight=self._count
        )
        title = f"{type(trainer).__name__}.compute_loss"
        self._train.keep_rows(title, reorders=True)
        self._predict.keep_rows(title, like=self._train, reorders=True)

    def train(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The batch's loss, after its backward pass; replicas meet where the optimizer's step follows."""
        options.check_microbatches(type(self.trainer).__name__, inputs)
        with nullcontext() if self.trainer.accelerator.sync_gradients else model.no_sync():
            losses = self._train(model, inputs, num_items_in_batch)
        return losses.reduce_mean().detach().to(self.trainer.args.device)

    def predict(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of the batch, as one process has them."""
        import torch

        from weft.torch.tensors.pytree import map_nodes

        options.check_microbatches(type(self.trainer).__name__, inputs)
        count: Any = getattr(self.trainer, "_get_num_items_in_batch", None)
        labelled = count is not None and isinstance(inputs, dict) and inputs.get("labels") is not None
        items = count([inputs], self.trainer.args.device) if labelled else None
        with torch.no_grad():
            loss, logits, labels = self._predict(
                model, inputs, items, prediction_loss_only, ignore_keys, **kwargs
            )
        one = None if isinstance(loss, list) else loss.reduce_mean()  # a list: None of every microbatch
        return one, map_nodes(logits, self._whole), map_nodes(labels, self._whole)

    def _count(self, model: Any, inputs: Any, *others: Any, **kwargs: Any) -> float:
        """The weight of a microbatch: the tokens of its loss, or else its samples."""
        import torch

        from weft.torch.tensors.mini_batch import named_tensors

        labels = inputs.get("shift_labels") if hasattr(inputs, "get") else None
        if labels is None and hasattr(inputs, "get"):
            labels = inputs.get("labels")
            if isinstance(labels, torch.Tensor) and self.shifted and labels.dim() > 1:
                labels = labels[..., 1:]
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            counted = float((labels != IGNORED).sum())
            if self.own_loss:
                self._warn(counted / max(1, len(labels)))
            return counted
        return float(next((len(each) for _, each in named_tensors(inputs, "") if each.dim()), 1))

    def _warn(self, ratio: float) -> None:
        """Warn once that the script's own loss may be a mean over something else than the labels that count."""
        self.ratios.add(ratio)
        if len(self.ratios) == 2:
            log.warning(
                "%s.compute_loss is the script's own, and sentences have other numbers of labels that count: "
                "microbatches weigh by these. A loss that is a mean over something else, samples say, is not that of "
                "the whole batch: divide sums by num_items_in_batch, or set microbatches=1",
                type(self.trainer).__name__,
            )  # fmt: skip

    def _whole(self, node: Any) -> Any:
        """A tensor of the batch, from those of its microbatches; shorter ones are padded as the Trainer pads."""
        from weft.torch import StepOutput

        if isinstance(node, list) and all(each is None for each in node):
            return None
        if not isinstance(node, StepOutput):
            return node
        if not node.outputs[0].dim():
            return node.reduce_mean()
        blocks = self._train.cut.joined.blocks
        parts = [each.chunk(blocks) for each in node.outputs]
        inorder = [part[block] for block in range(blocks) for part in parts]
        return functools.reduce(functools.partial(self.concat, padding_index=IGNORED), inorder)


def _train_microbatch(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """The step of training; a method of the Trainer, so that what it counts is noted, see ``kept_state``.

    Trainers before transformers 4.46 count no items.
    """
    train = type(trainer).training_step
    counts = len(inspect.signature(train).parameters) > 3
    with _inside():
        return train(trainer, model, inputs, *([_part_of(items)] if counts else []))


def _predict_microbatch(
    trainer: Any, model: Any, inputs: Any, items: Any, loss_only: bool, ignored: Any, **kwargs: Any
) -> Any:
    """The step of evaluation."""
    with _inside(_part_of(items)):
        return type(trainer).prediction_step(trainer, model, inputs, loss_only, ignored, **kwargs)


@contextmanager
def _inside(*items: Any) -> Iterator[None]:
    """Inside, this thread runs a microbatch, for which the Trainer's ordinary code is right; ``items``: what it counts.

    Microbatches have a thread each, and take turns: what one sets in the Trainer the others would see.
    """
    _here.inside, _here.items = True, items
    try:
        yield
    finally:
        _here.inside, _here.items = False, ()


def inside() -> bool:
    """True if this thread runs a microbatch of a Trainer's step."""
    return getattr(_here, "inside", False)


def _part_of(items: Any) -> Any:
    """The microbatch's part of the items that the batch's loss is divided by.

    A loss that is a sum over items, divided by them, is then the mean over the microbatch's, and so is one that does
    not look at them: both are averaged by weight.
    """
    from weft.torch.execution.thread_settings import share

    part = share()
    return items if items is None or part is None else items * part


def _is_causal(trainer: Any) -> bool:
    return "CausalLM" in type(trainer.model).__name__ or "LMHeadModel" in type(trainer.model).__name__
