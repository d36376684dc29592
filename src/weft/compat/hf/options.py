"""Options of Hugging Face's Trainer: what a split model cannot honour is refused by name, nothing is ignored."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from weft.compat.modelparallel.session import state
from weft.errors import ConfigError, UsageError

log = logging.getLogger("weft")

OLDEST = "4.40"
"""The oldest transformers whose Trainer works; tests/README.md says which ones are tested."""
OVERLAP = 2
"""Microbatches for each partition where nobody says how many: with less, partitions wait for each other."""

ELSEWHERE = {
    "deepspeed": "weft splits the model itself: leave it out",
    "fsdp": "set sharded_data_parallel_degree instead, see docs/data-parallel.md",
    "parallelism_config": "say partitions=... instead",
    "auto_find_batch_size": "ranks would run out of memory at different times: set per_device_train_batch_size",
    "torch_compile": "a compiled model cannot be split: compile modules inside of it, with module.compile()",
    "enable_jit_checkpoint": "ranks get the signal at different times: save with save_steps",
    "bf16_full_eval": "the model stays as it is trained: leave it out",
    "fp16_full_eval": "the model stays as it is trained: leave it out",
}
"""Arguments that must stay off, with the remedy."""

OPTIMIZERS = ("lomo", "adalomo", "layerwise")
"""Parts of names of optimizers that change weights inside of the backward pass, where microbatches still need them."""


def install(trainer: ModuleType) -> None:
    """Let the Trainer refuse at its beginning what a split model cannot do, once ``smp.init()`` has been called."""
    cls = trainer.Trainer
    made = cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if _splits(trainer) and given is not None:
            refuse(given)
        made(self, *args, **kwargs)
        if _splits(trainer):
            self.accelerator.scaler = None  # the optimizer of a split model scales losses by itself

    cls.__init__ = init
    if hasattr(cls, "_validate_args"):
        _take_bfloat16(trainer, cls)
    _refuse_search(trainer, cls)


def arguments(module: ModuleType) -> None:
    """Change ``transformers.training_args``: ``use_cpu`` works, and replicas are no wrong way of starting."""
    cls = module.TrainingArguments
    if not hasattr(cls, "use_cpu"):
        refuse_older(cls, module.is_sagemaker_mp_enabled)
        return
    found = cls._setup_devices.func if hasattr(cls._setup_devices, "func") else cls._setup_devices.fget

    def devices(self: Any) -> Any:
        if module.is_sagemaker_mp_enabled() and getattr(
            self.accelerator_config, "use_configured_state", False
        ):
            self.accelerator_config.use_configured_state = False  # with a split model there is none by now
        if not (self.use_cpu and module.is_sagemaker_mp_enabled() and state.initialized):
            return found(self)
        from weft.torch.session.current import session

        if session().device.type != "cpu":
            raise ConfigError(
                "use_cpu=True, but this job trains on GPUs: start it with weft run --device cpu"
            )
        object.__setattr__(self, "use_cpu", False)
        try:
            return found(self)
        finally:
            object.__setattr__(self, "use_cpu", True)

    cached = type(cls.__dict__["_setup_devices"])(devices)
    if hasattr(cached, "__set_name__"):
        cached.__set_name__(cls, "_setup_devices")
    cls._setup_devices = cached
    name = "_is_torch_distributed_initialized"
    if hasattr(module, name):
        initialized = getattr(module, name)
        setattr(module, name, lambda: initialized() and not module.is_sagemaker_mp_enabled())


def refuse_older(cls: Any, splits: Callable[[], bool]) -> None:
    """Let nobody make an object of a class of an older transformers where a model is to be split."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if splits():
            version = importlib.import_module("transformers").__version__
            raise ConfigError(
                f"the {cls.__name__} of transformers {version} cannot split a model: weft knows those from {OLDEST} on "
                f'(pip install "transformers>={OLDEST}"). A loop of the script\'s own works with any version'
            )
        made(self, *args, **kwargs)

    cls.__init__ = init


def refuse(args: Any) -> None:
    """Refuse arguments that ask for what a split model cannot do.

    Raises:
        ConfigError: With the arguments' names, and what to do instead.
    """
    faults = [f"{name}: {remedy}" for name, remedy in ELSEWHERE.items() if getattr(args, name, None)]
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in OPTIMIZERS):
        faults.append(
            f'optim="{optimizer}": it changes weights in the backward pass; use another, "adamw_torch" say'
        )
    if args.fp16 and not state.cfg.fp16:
        faults.append(
            'fp16: use bf16=True, or give weft the setting "fp16": true, which keeps 32-bit masters'
        )
    if state.cfg.inputs == "per_rank":
        faults.append(
            "prescaled_batch: without it each rank that splits tensors reads samples of its own, which the Trainer "
            'would count as replicas; write "prescaled_batch": true'
        )
    config = args.accelerator_config
    for name in ("dispatch_batches", "use_stateful_dataloader"):
        if getattr(config, name, None):
            faults.append(f"accelerator_config.{name}: each replica reads its own batches; leave it out")
    if getattr(args, "eval_use_gather_object", False) and args.world_size > 1:
        faults.append("eval_use_gather_object: objects are not gathered from replicas; leave it out")
    if faults:
        raise ConfigError("the Trainer's arguments do not fit a split model. " + ". ".join(faults))


_settings_with_choice: list[Any] = []
"""The settings in which nobody but this file has said how many microbatches there are; at most one."""


def _is_given() -> bool:
    """True if the script or its launch says how many microbatches there are."""
    own = any(each is state.given for each in _settings_with_choice)
    return state.is_given("microbatches") and not own


def _choose(microbatches: int) -> None:
    state.init({"microbatches": microbatches})
    _settings_with_choice[:] = [state.given]


def choose_microbatches() -> None:
    """Set a number of microbatches with which the partitions overlap, where nobody says how many there are."""
    from weft.torch.session.current import session

    partitions = session().settings.partitions
    if partitions > 1 and not _is_given():
        _choose(OVERLAP * partitions)
        log.info(
            "microbatches is not set: the Trainer's batches are cut into %d, or one for each sample if there are less",
            OVERLAP * partitions,
        )


def check_microbatches(trainer: str, inputs: Any) -> None:
    """Take one microbatch where a batch is a list of examples, as TRL's GRPOTrainer has it: each of several would get
    all of it.

    Raises:
        UsageError: The script wants several.
    """
    from weft.torch.session.current import session
    from weft.torch.tensors.pytree import tensors_in

    count = session().settings.microbatches
    if session().settings.partitions == 1 or count == 1 or tensors_in(inputs):
        return
    if _is_given():
        raise UsageError(
            f"{trainer} gets batches of examples without tensors, which cannot be cut into {count} microbatches: each "
            "would get all of them. Write microbatches=1"
        )
    _choose(1)
    log.info("the batches of %s are examples without tensors, which cannot be cut: one microbatch", trainer)


def _splits(trainer: ModuleType) -> bool:
    return state.initialized and trainer.is_sagemaker_mp_enabled()


def _take_bfloat16(trainer: ModuleType, cls: Any) -> None:
    """Let the Trainer accept bfloat16: it refuses that with the original, where bfloat16 did not work."""
    validate = cls._validate_args

    @functools.wraps(validate)
    def validate_args(self: Any) -> None:
        asked = self.args.bf16
        if _splits(trainer):
            self.args.bf16 = False
        try:
            validate(self)
        finally:
            self.args.bf16 = asked

    cls._validate_args = validate_args


def _refuse_search(trainer: ModuleType, cls: Any) -> None:
    search = cls.hyperparameter_search

    @functools.wraps(search)
    def hyperparameter_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _splits(trainer):
            raise ConfigError(
                "hyperparameter_search() does not work with a split model: its trials would differ between ranks. "
                "Start one job for each trial"
            )
        return search(self, *args, **kwargs)

    cls.hyperparameter_search = hyperparameter_search
