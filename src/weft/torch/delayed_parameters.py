"""Models too big for one process: parameters that come into being only where they belong.

Inside :func:`delay_param_initialization` large tensors are made on the meta device, without memory, and every
operation that would give them a value (``normal_``, ``kaiming_uniform_``, a copy into a row) is written down. After the
partition each rank replays what concerns its own part. Each operation draws its random numbers from a seed of its own,
so the values depend on the seed at construction, but neither on the split nor on what other ranks replay; they
are not those that the same seed gives without the delay. Small tensors (up to ``SMALL`` elements) are made as usual.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.runtime.allocator import is_mapped
from weft.torch.execution.in_place import same_view
from weft.torch.pytorch.private import (
    CONVERSION,
    TorchDispatchMode,
    arguments_of,
    no_torch_function,
    results_of,
    storage_key,
    version,
)
from weft.torch.session.random_streams import TORCH, Streams, mix
from weft.torch.tensors.marks import RECIPES
from weft.torch.tensors.pytree import map_tensors, tensors_in

SMALL = 16384
FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "empty_strided",
        "normal",
        "eye",
    )
)


READS_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
"""Lets transformers read weights in this thread: what is done in other threads is not written down."""
CPU = torch.device("cpu")


def _is_in_a_file(tensor: Tensor) -> bool:
    """True for a large tensor whose memory is a file's, as safetensors and ``torch.load(mmap=True)`` give it."""
    return tensor.device == CPU and tensor.numel() > SMALL and is_mapped(tensor.data_ptr())


def _view_of(made: Tensor, tensor: Tensor) -> Tensor:
    """The view of a tensor that was made, which begins its memory, that another one was of it before."""
    found = same_view(tensor, made, made)
    if found is None:
        raise UsageError(
            f"a delayed parameter or buffer is {tensor.dtype}, and reads the memory of one that is {made.dtype}: make "
            "it outside of weft.delay_param_initialization()"
        )
    return found


class Recipes:
    """The operations that were done to tensors without memory, by their storage."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.entries: list[tuple[Any, Any, Any, list[tuple[Tensor, int]], torch.dtype]] = []
        self.by_storage: dict[int, list[int]] = {}
        self.storages: list[Any] = []

    def add(self, func: Any, args: Any, kwargs: Any, touched: list[Tensor]) -> None:
        """An operation that makes or changes the tensors ``touched``. Values that it reads are those of now."""
        read: list[tuple[Tensor, int]] = []

        def kept(tensor: Tensor) -> Tensor:
            if tensor.device.type == "meta":
                return tensor.data  # no hold on the parameter of which it may be a view
            if tensor.numel() <= SMALL:
                return tensor.detach().clone()
            read.append((tensor, version(tensor)))
            return tensor

        self.entries.append((func, *map_tensors((args, kwargs), kept), read, torch.get_default_dtype()))
        for tensor in touched:
            storage = tensor.untyped_storage()
            if storage_key(tensor) not in self.by_storage:
                self.storages.append(storage)
            self.by_storage.setdefault(storage_key(tensor), []).append(len(self.entries) - 1)

    def materialise(self, tensor: Tensor, streams: Streams) -> Tensor:
        """The values of a tensor without memory."""
        made: dict[int, Tensor] = {}
        self._make(storage_key(tensor), made, streams)
        return _view_of(made[storage_key(tensor)], tensor)

    def _make(self, storage: int, made: dict[int, Tensor], streams: Streams) -> None:
        def real(tensor: Tensor) -> Tensor:
            if tensor.device.type != "meta":
                return tensor
            key = storage_key(tensor)
            if key not in made and key != storage:
                self._make(key, made, streams)
            return _view_of(made[key], tensor)

        for number in self.by_storage.get(storage, ()):
            func, args, kwargs, read, default = self.entries[number]
            if any(version(tensor) != before for tensor, before in read):
                raise UsageError(
                    "a tensor from which a delayed parameter takes its values was written to afterwards; they are read "
                    "when the first step splits the model: copy from a clone that nobody changes"
                )
            kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            with torch.no_grad(), streams.own(mix(self.seed, number), TORCH), _default_dtype(default):
                new_args, new_kwargs = map_tensors((args, kwargs), real)
                result = func(*new_args, **new_kwargs)
            if storage not in made:
                made[storage] = result[0] if isinstance(result, (list, tuple)) else result
        if storage not in made:
            raise UsageError(
                "a parameter on the meta device has no recorded values: build the model inside "
                "weft.delay_param_initialization(), not under torch.device('meta')"
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors of floating-point numbers are made of that type where nobody names one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Record(TorchDispatchMode):
    """Writes down what makes or changes tensors without memory; views need no entry."""

    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self.recipes = recipes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is CONVERSION and _is_in_a_file(args[0]) and kwargs.get("device") in (None, CPU):
            result = func(*args, **{**kwargs, "device": torch.device("meta")})
            self.recipes.add(func, args, {**kwargs, "device": CPU}, [result])
            return result
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            # a value is asked for, or written where there is memory: GPT-BigCode fills a mask so
            delayed = [
                each for each in tensors_in((args, kwargs)) if storage_key(each) in self.recipes.by_storage
            ]
            if not delayed:
                raise
            args, kwargs = map_tensors((args, kwargs), self._with_values)
            return func(*args, **kwargs)
        written = [
            value
            for value, argument in [
                *zip(args, arguments_of(func), strict=False),
                *((kwargs[a.name], a) for a in arguments_of(func) if a.name in kwargs),
            ]
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        if written:
            touched = [tensor for tensor in written if tensor.device.type == "meta"]
        elif any(returned.alias_info is not None for returned in results_of(func)):
            touched = []
        else:
            outputs = result if isinstance(result, (list, tuple)) else (result,)
            touched = [t for t in outputs[:1] if isinstance(t, Tensor) and t.device.type == "meta"]
        if touched:
            self.recipes.add(func, args, kwargs, touched)
        return result

    def _with_values(self, tensor: Tensor) -> Tensor:
        """A tensor without memory as it will be made; others as they are."""
        if tensor.device.type != "meta" or storage_key(tensor) not in self.recipes.by_storage:
            return tensor
        return self.recipes.materialise(tensor, Streams(CPU))


def moved(tensor: Tensor, leaves_out: Callable[[Any], bool], *args: Any, **kwargs: Any) -> Tensor:
    """`tensor.to(*args, **kwargs)` without the devices that are left out; the tensor itself if nothing remains."""
    kept = [each for each in args if not leaves_out(each)]
    kwargs = {name: value for name, value in kwargs.items() if name != "device" or not leaves_out(value)}
    if len(kept) < len(
        args
    ):  # `to(device, dtype, non_blocking, copy)` has become `to(dtype, non_blocking, copy)`
        kept = kept if kept and isinstance(kept[0], torch.dtype) else []
    return tensor.to(*kept, **kwargs) if kept or kwargs.keys() - {"non_blocking"} else tensor


def _is_cpu(given: Any) -> bool:
    return isinstance(given, (str, torch.device)) and torch.device(given) == CPU


class _Large(TorchFunctionMode):
    """Makes large tensors on the meta device, unless they ask for a device themselves.

    What is moved to the CPU stays what it is: a parameter of which everybody but weft believes that it is there.
    """

    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self.recipes = recipes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in (Tensor.to, Tensor.cpu)
            and args[0].is_meta
            and storage_key(args[0]) in self.recipes.by_storage
        ):
            if func is Tensor.cpu:
                return args[0]
            with no_torch_function():
                return moved(args[0], _is_cpu, *args[1:], **kwargs)
        if func in FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            before = torch.get_rng_state()
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > SMALL:
                return made
            torch.set_rng_state(before)
        return func(*args, **kwargs)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Modules built inside take no memory until the partition; then each rank makes its own part only.

    ``enabled=False`` does nothing, so that a flag of the script can decide.
    """
    if not enabled:
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    recipes = Recipes(seed)
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and param.device.type == "meta":
            module.__dict__.setdefault(RECIPES, recipes)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    before = os.environ.get(READS_IN_ORDER)
    os.environ[READS_IN_ORDER] = "1"
    try:
        with _Large(recipes), _Record(recipes):
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        if before is None:
            del os.environ[READS_IN_ORDER]
        else:
            os.environ[READS_IN_ORDER] = before


def has_delayed(root: nn.Module) -> bool:
    """True if any parameter or buffer of the model waits to be made."""
    return any(t.device.type == "meta" for t in (*root.parameters(), *root.buffers()))


def materialise(
    root: nn.Module,
    keep: Callable[[str], bool],
    device: torch.device,
    streams: Streams,
    part: Callable[[Tensor, Tensor], Tensor] = lambda made, parameter: made,
    weights_device: torch.device | None = None,
) -> None:
    """Make the parameters and buffers for whose name ``keep`` holds; the others get no memory.

    The parameter objects stay the same, with their attributes, so that optimizers built from them still fit.

    Args:
        root: The model.
        keep: Whether the parameter of a name belongs on this rank.
        device: Where.
        streams: The random numbers, which stay as they are.
        part: What this rank keeps of a whole parameter, from its values and the parameter. One parameter after another
            is made whole, so no more than one is.
        weights_device: Where the parameters that are kept go instead, if given.
    """
    lost = [name for name, t in root.named_parameters() if t.is_meta and not isinstance(t, nn.Parameter)]
    if lost:
        raise UsageError(f"{lost[0]} is no nn.Parameter, so it would not be trained: make it one")
    recipes = [module.__dict__[RECIPES] for module in root.modules() if RECIPES in module.__dict__]
    named = {id(t): (name, t) for name, t in [*root.named_parameters(), *root.named_buffers()]}
    for name, tensor in named.values():
        if tensor.device.type != "meta":
            continue
        if isinstance(tensor, nn.Parameter) and not keep(name):
            new = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        else:
            key = storage_key(tensor)
            holder = next((found for found in recipes if key in found.by_storage), Recipes(0))
            new = holder.materialise(tensor, streams)
            if isinstance(tensor, nn.Parameter):
                new = part(new, tensor).to(weights_device or device)
            else:
                new = new.to(device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, made)
        else:
            torch.utils.swap_tensors(tensor, new.clone())
    for module in root.modules():
        module.__dict__.pop(RECIPES, None)
