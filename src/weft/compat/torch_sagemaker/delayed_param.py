"""``DelayedParamIniter``: values for a model that was made on the device ``meta``, layer by layer as FSDP shards it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weft.compat.torch_sagemaker.state import state
from weft.errors import UsageError

Init = Callable[[nn.Module], Any]
REMEDY = (
    "give DelayedParamIniter(model, init_method_using_config=function) one that fills it, or make the model outside of "
    "torch.device('meta')"
)


class Materialized:
    """Puts real tensors in the place of those on ``meta``, one for each, also where modules share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(self, module: nn.Module) -> list[str]:
        """Give a module, without its children, tensors full of NaN; the names of those that it did not share."""
        new = []
        for name, old in own(module):
            if not old.is_meta:
                continue
            if id(old) not in self._made:
                self._made[id(old)] = old, self._real(old)
                new.append(name)
            setattr(module, name, self._made[id(old)][1])
        return new

    def _real(self, old: Tensor) -> Tensor:
        values = torch.empty_like(old, device=self.device, requires_grad=False)
        if values.is_floating_point():
            values.fill_(float("nan"))
        return nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values


class DelayedParamIniter:
    """Gives FSDP what fills the parameters and buffers of a model that was made under ``torch.device("meta")``.

    A module gets its values from ``reset_parameters()`` and then from the model's ``_init_weights``, as in
    transformers. Random numbers come from the setting ``random_seed``, so that ranks with copies have the same.

    Args:
        model: The model, before FSDP wraps it.
        init_method_using_config: Fills one module, in place of ``_init_weights``.
        verbose: Changes nothing.
    """

    def __init__(
        self, model: nn.Module, init_method_using_config: Init | None = None, verbose: bool = False
    ) -> None:
        self._model = model
        self._config = getattr(model, "config", None)
        self._init: Init | None = init_method_using_config or getattr(model, "_init_weights", None)
        self._seed: int = state.random_seed
        self._random: list[Tensor] | None = None
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._real = Materialized(compute_device())

    def get_param_init_fn(self) -> Init:
        """The function for FSDP's ``param_init_fn``."""
        return self._fill

    def get_post_param_init_fn(self) -> Init | None:
        """The value for FSDP's ``post_param_init_fn``: None, for shared parameters are shared already."""
        return None

    @contextmanager
    def validate_params_and_buffers_inited(self) -> Iterator[None]:
        """A context after which every parameter and buffer has values, or an error names those without."""
        yield
        without = [
            name
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers())
            if tensor.is_meta
        ]
        if without:
            raise UsageError(
                f"{', '.join(without[:8])} got no values: give FSDP param_init_fn=initer.get_param_init_fn()"
            )

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        """Fill a module and all below it that FSDP has not wrapped: children first, as a model's constructor does."""
        below = list(_unwrapped(module))
        new = {each: self._real.fill(each) for each in below}
        if not any(new.values()):
            return  # what FSDP lists below a module that was filled
        with self._drawing():
            for each in below:
                self._fill_one(each, new[each])

    def _fill_one(self, module: nn.Module, names: list[str]) -> None:
        copied = self._copied(
            module, [name for name, _ in module.named_buffers(recurse=False) if name in names]
        )
        reset = getattr(module, "reset_parameters", None)
        if names and callable(reset):
            reset()
        if self._init is not None and (names or not any(map(_is_wrapped, module.modules()))):
            self._init(module)  # that of some parents draws weights of their children again
        by_torch = type(module).__module__.startswith("torch.nn.")
        for name, tensor in own(module):
            if name not in names or name in copied:
                continue
            if bool(tensor.isnan().any()) if tensor.is_floating_point() else not by_torch:
                raise UsageError(f"nothing gives values to {self._names.get(module, '')}.{name}: {REMEDY}")

    def _copied(self, module: nn.Module, buffers: list[str]) -> list[str]:
        """Those of a module's buffers that could be taken from another module made of the same config."""
        taken = inspect.signature(type(module).__init__).parameters
        config = getattr(module, "config", self._config)
        if not buffers or config is None or "config" not in taken:
            return []
        given = {name: getattr(module, name) for name in taken if hasattr(module, name) and name != "device"}
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                other = type(module)(**{**given, "config": config})
        except TypeError:
            return []
        values = dict(other.named_buffers(recurse=False))
        if _plain(other) != _plain(module):
            return []
        found = [
            name for name in buffers if name in values and values[name].shape == getattr(module, name).shape
        ]
        for name in found:
            getattr(module, name).copy_(values[name])
        return found

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Random numbers of this object's own, which go on from one layer to the next."""
        cuda = [self._real.device] if self._real.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            if self._random is None:
                torch.manual_seed(self._seed)
            else:
                torch.set_rng_state(self._random[0])
                for device, numbers in zip(cuda, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(numbers, device)
            yield
            self._random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]


def compute_device() -> torch.device:
    """The device of this process's work."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers, without its children's."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those below it that FSDP has not wrapped, children first."""
    for child in module.children():
        if not _is_wrapped(child):
            yield from _unwrapped(child)
    yield module


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's numbers and words."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, type(None)))
        and name != "training"
        and not name.startswith("_")
    }
