"""PyTorch Lightning's Trainer with models that weft splits: `Trainer(strategy=WeftStrategy(partitions=2))`.

Lightning runs `training_step`, then `zero_grad`, then the backward pass. A step of weft runs the first and the last of
them together, once for each microbatch. So that every hook finds what it would find in one process, a step begins
without gradients, and what it leaves is put in place when Lightning asks for the backward pass:

    training_step   gradients of before are set aside; the step runs, forward and backward; its gradients are set aside
    zero_grad       clears those of before, as ever
    backward        those of the step are added
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from weft.communication import objects
from weft.errors import UsageError
from weft.integrations import whole
from weft.integrations.alike import draw_alike
from weft.integrations.lightning_module import Inside
from weft.integrations.lightning_ranks import JoinsJob, Ranks, pl, wrapped
from weft.integrations.whole import Record, Whole, refuse_uncut
from weft.session import ranks
from weft.torch import convert_sync_batchnorm
from weft.torch.model import DistributedModel
from weft.torch.placed import changes
from weft.torch.session import current
from weft.torch.step import Step, step

_NO_OPTIMIZER = ("LBFGS",)


class WeftStrategy(JoinsJob, pl.strategies.ParallelStrategy):
    """Splits the LightningModule of a `Trainer` over the ranks, which any launcher has started.

    `partitions`: over how many; with more ranks than that, groups of so many train copies of it. `microbatches`: into
    how many slices a batch is cut. `settings`: more of `weft.init`'s. Ranks of one copy must read the same batches,
    which is checked at every step, unless `settings` say `checked="first"`.
    """

    def __init__(
        self, partitions: int = 1, microbatches: int = 1, *, checkpoint_io: Any = None, **settings: Any
    ) -> None:
        super().__init__(cluster_environment=Ranks(), checkpoint_io=checkpoint_io)
        self.settings = {
            "partitions": partitions,
            "microbatches": microbatches,
            "checked": "always",
            **settings,
        }
        self.split: DistributedModel | None = None
        self._steps: dict[str, Step] = {}
        self._stashed: list[tuple[nn.Parameter, Tensor]] = []
        self._inside: Inside | None = None
        self._layer_sync: Any = None
        self.optimizers: Any

    # --- the job ---------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True if data are shared out, and logged values all-reduced: over the replicas."""
        return current.is_initialized() and ranks.rdp_size() > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each replica reads its own shard, the ranks of one copy the same."""
        return {"num_replicas": ranks.rdp_size(), "rank": ranks.rdp_rank()}

    def setup_environment(self) -> None:
        self.join(self.precision_plugin)
        super().setup_environment()

    def __repr__(self) -> str:
        return "<weft.integrations.lightning.WeftStrategy, for the Trainer; Fabric's is weft.integrations.fabric's>"

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
        if overridden("backward", module):
            raise UsageError(
                f"{type(module).__name__}.backward() is overridden, but a split model's backward pass is weft's: leave "
                "it out, and change gradients in on_after_backward()"
            )
        known = [each for each in current.session().models if each.get_module() is module]
        if known:
            (self.split,) = known
        else:
            if self._layer_sync is not None:
                convert_sync_batchnorm(module)
                self._layer_sync = None
            self.split = DistributedModel(module)
        draw_alike(objects.MP_GROUP)
        self._steps.clear()
        self._inside = Inside(self, trainer, module)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """`DistributedModel` has brought it there."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if type(optimizer).__name__ in _NO_OPTIMIZER:
                raise UsageError(
                    f"{type(optimizer).__name__} looks at all parameters at once, and a rank has only its own: choose "
                    "an optimizer that updates each parameter for itself"
                )
        self.optimizers = [wrapped(optimizer) for optimizer in self.optimizers]

    def teardown(self) -> None:
        """The model stays split, for the next call of the Trainer."""
        if self._inside is not None:
            self._inside.restore()
            self._inside = None
        self._stashed = []
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- steps -----------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert self.split is not None and self._inside is not None
        if not module.automatic_optimization and ranks.mp_size() > 1:
            return self._manual_step(args, kwargs)
        if not module.automatic_optimization:  # nothing is split, and no batch is cut
            with self.precision_plugin.train_step_context():
                return module.training_step(*args, **kwargs)
        trainer = module.trainer
        first = args[1] % trainer.accumulate_grad_batches == 0 if len(args) > 1 else True
        keep = self._watched("on_before_zero_grad", "optimizer_zero_grad")
        with self._without_gradients(keep) if first else nullcontext():
            return self._run("training_step", args, kwargs)

    def _manual_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._inside is not None
        with self._without_gradients(keep=True):
            output = self._run("training_step", args, kwargs)
        self._inside.finish_manual()
        return output

    def _watched(self, *hooks: str) -> bool:
        """True if anybody looks at the gradients of before in one of these hooks."""
        module = self.lightning_module
        overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
        return any(
            overridden(hook, module)
            or any(overridden(hook, each, pl.Callback) for each in module.trainer.callbacks)
            for hook in hooks
            if hasattr(pl.Callback, hook) or overridden(hook, module)
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One hook of the module, for all microbatches: what it returns for the whole batch."""
        assert self.split is not None and self._inside is not None
        self.split.training = self.lightning_module.training  # without its modules, each of which has its own
        what = f"{type(self.lightning_module).__name__}.{name}"
        refuse_uncut(args[0], what)
        for each in (
            {"training_step": None, name: None}
            if hasattr(self.lightning_module, "training_step")
            else (name,)
        ):
            if each not in self._steps:
                self._steps[each] = self._step(each, f"{type(self.lightning_module).__name__}.{each}")
        with self._inside.microbatches(what):
            result = self._steps[name](*args, **kwargs)
        whole = Whole(result, what)
        self._inside.replay(whole)
        return whole.output()

    def _step(self, name: str, what: str) -> Step:
        module, split, inside = self.lightning_module, self.split, self._inside
        assert split is not None and inside is not None
        short = {"training_step": "train_step", "validation_step": "val_step"}.get(name, name)
        context = getattr(self.precision_plugin, f"{short}_context")
        automatic = name == "training_step" and module.automatic_optimization
        function = getattr(module, name)

        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            record = Record()
            with record.active(), context():
                record.output = function(batch, *args, **kwargs)
            if automatic:
                split.backward(loss_of(record.output, what) / module.trainer.accumulate_grad_batches)
            return record.returned()

        run.__name__ = run.__qualname__ = what
        tokens = current.session().settings.trainer_tokens if name == "training_step" else ""
        made: Step = step(run, allow_uneven=True, tokens=tokens or None)
        trains = made if name == "training_step" else self._steps.get("training_step")
        made.keep_rows(what, like=trains)
        return made

    # --- gradients -------------------------------------------------------------------------------------------

    @contextmanager
    def _without_gradients(self, keep: bool) -> Iterator[None]:
        """Inside, the model has no gradients; afterwards those of before, and the new ones wait.

        Unless all are kept, not those that an optimizer is about to clear.
        """
        assert self.split is not None
        parameters = list(self.split.parameters())
        groups = [] if keep else [group for each in self.optimizers for group in each.param_groups]
        cleared = {id(each) for group in groups for each in group["params"]}
        before = [(each, each.grad) for each in parameters if id(each) not in cleared]
        _clear(parameters)
        yield
        self._stashed = [(each, each.grad) for each in parameters if each.grad is not None]
        _clear(parameters)
        for each, grad in before:
            if grad is not None:
                each.grad = grad

    def add_gradients(self) -> None:
        """Those of the step come to those that are there."""
        for parameter, grad in self._stashed:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._stashed = []

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """In a microbatch of manual optimization its backward pass; else the step has gone backward already."""
        assert self.split is not None and self._inside is not None
        if whole.current() is not None:
            self._inside.going_backward(closure_loss)
            self.split.backward(closure_loss, *args, **kwargs)
            return closure_loss.detach()
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        if self.lightning_module.automatic_optimization:
            self.add_gradients()
        else:
            changes.look(current.session())  # the module may have frozen parameters since the last one
            self.split.backward(loss, *args, **kwargs)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.split is not None
        with self.split.no_sync():
            yield

    # --- checkpoints -----------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.lightning_module.state_dict() if self.split is None else self.split.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        known = [each for each in current.session().models if each.get_module() is self.lightning_module]
        (known[0] if known else self.lightning_module).load_state_dict(
            checkpoint["state_dict"], strict=strict
        )


def loss_of(output: Any, what: str) -> Tensor:
    """The loss in what a training step returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{what} returned {'None' if output is None else 'no loss'}: with a split model every batch has one"
        )
    return loss


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = None
