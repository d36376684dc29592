"""Mixtures of experts that are modules and can be shared out by expert: found in one run, and tried out.

A mixture is the innermost module that runs around a list of modules of one kind, each of which gets some of the rows,
and none what another one gives. It is tried as ranks would run it (see ``held``): each with some of its experts, zeros
for those of others. Its results have to add up, or be the same on all ranks, and so do all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.backward.autograd import is_hooked
from weft.torch.session.random_streams import TORCH, Streams
from weft.torch.tensor_parallel.cuts import part_sizes
from weft.torch.tensor_parallel.functions import FATAL
from weft.torch.tensor_parallel.splits import Held, Linear
from weft.torch.tensors.marks import TAGS
from weft.torch.tensors.pytree import map_tensors, tensors_in

from .equivalence import BY_OBJECT, PLAIN, in_mode, in_objects, kind_of
from .layout_trials import DROPOUTS, tried

Fitting = Callable[[nn.Module, Sequence[Held], int, Any, Any, int], Linear | str]
"""As :func:`tried`."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class _Group:
    """The modules of one list, by name, and what the run showed of their calls."""

    names: list[str]
    rows: set[int] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    chained: bool = False
    fault: str = ""
    width: int = 0
    rounded: bool = False
    draws: bool = False

    def note(self, name: str, args: Any, result: Any) -> None:
        """Notes a call's arguments and result of one of them."""
        given, made = tensors_in(args), tensors_in(result)
        self.chained |= any(getattr(each, TAGS) == id(self) for each in given)
        for each in made:
            setattr(each, TAGS, id(self))
        if not given or len(made) != 1 or made[0] is not result or made[0].shape[:-1] != given[0].shape[:-1]:
            self.fault = "an expert's result is not one tensor with a row for each of its inputs"
            return
        self.called.add(name)
        self.rows.add(given[0].shape[:-1].numel())
        width, rounded = made[0].shape[-1], made[0].dtype != given[0].dtype
        kind = made[0].device.type
        if rounded and not (
            torch.is_autocast_enabled(kind) and made[0].dtype == torch.get_autocast_dtype(kind)
        ):
            self.fault = f"an expert gives {made[0].dtype} for {given[0].dtype}"
        elif self.width and (width, rounded) != (self.width, self.rounded):
            self.fault = "experts give results of several widths or types"
        self.width, self.rounded = width, rounded

    def is_routed(self, rows: int) -> bool:
        """True if of so many rows each goes to some of them only."""
        return bool(self.called) and (self.rows != {rows} or len(self.called) < len(self.names))


def find_mixtures(
    model: nn.Module,
    run: Callable[[], Any],
    size: int,
    owners: Mapping[int, Sequence[str]],
    why: Callable[[str], str],
    leaking: Collection[str] = (),
    fitting: Fitting = tried,
) -> tuple[dict[str, Linear], dict[str, str]]:
    """The mixtures whose experts ranks can share out, and how; and of the others why not.

    Args:
        model: The model, whole.
        run: Runs it once.
        size: How many ranks axis ``tp`` has.
        owners: For each parameter, by its id, the modules that have it.
        why: Says for a module why the script's own wishes or changes keep it whole; empty if nothing does.
        leaking: Modules out of which tensors get by another way than their result.
        fitting: Finds how a mixture can be split, or why not; over ranks with the same rows, if not given.
    """
    groups = list(_groups(model))
    if not groups or any(value.device.type == "meta" for value in model.parameters()):
        return {}, {}
    calls = _watched(model, groups, run)
    around: dict[str, list[_Group]] = {}
    for group in groups:
        name = _around(group.names[0], calls)
        if name is not None and not group.chained and group.is_routed(_rows(calls[name])):
            around.setdefault(name, []).append(group)
    found: dict[str, Linear] = {}
    other: dict[str, str] = {}
    known: dict[Any, Linear | str] = {}
    for name in sorted(around, key=len, reverse=True):  # inner ones first
        if any(is_in(each, name) for each in (*found, *other)):
            continue
        module, inside = model.get_submodule(name), around[name]
        outcome: Linear | str = _why_not(model, name, inside, size, owners, why, leaking)
        outcome = outcome or in_objects(calls[name]) * BY_OBJECT
        if not outcome:
            held, count = _held(name, inside, size), len(inside[0].names)
            kind = kind_of(name, module), held
            if kind not in known:
                known[kind] = fitting(module, held, count, *calls[name], size)
            outcome = known[kind]
        if isinstance(outcome, Linear):
            found[name] = outcome
        else:
            other[name] = outcome
    return found, other


def _held(name: str, groups: Sequence[_Group], size: int) -> tuple[Held, ...]:
    """The rank that is to hold each of a mixture's experts."""
    start = len(name) + 1 if name else 0
    sizes = part_sizes(len(groups[0].names), size)
    numbers = [rank for rank, count in enumerate(sizes) for _ in range(count)]
    return tuple(
        Held(own[start:], rank, group.width, group.rounded, group.draws)
        for group in groups
        for own, rank in zip(group.names, numbers, strict=True)
    )


def _rows(call: Any) -> int:
    """The number of rows that a module is called with."""
    return next((each.shape[:-1].numel() for each in tensors_in(call) if each.is_floating_point()), 0)


def shares_out(found: Mapping[str, Linear], name: str) -> bool:
    """True if a module is a part of one of these mixtures, so that nothing of it is split otherwise."""
    return any(
        name != mixture
        and is_in(name, mixture)
        and not any(
            each.rank is None and is_in(name, f"{mixture}.{each.name}" if mixture else each.name)
            for each in linear.held
        )
        for mixture, linear in found.items()
    )


def is_in(name: str, module: str) -> bool:
    """True if a module is another one, or inside of it."""
    return not module or name == module or name.startswith(f"{module}.")


def _groups(model: nn.Module) -> Iterator[_Group]:
    """The lists of modules that are alike."""
    for name, module in model.named_modules():
        children = {
            f"{name}.{own}" if name else own: child
            for own, child in module.named_children()
            if next(child.parameters(), None) is not None
        }
        if isinstance(module, _LISTS) and len(children) > 1 and len({*map(_kind, children.values())}) == 1:
            yield _Group([*children])


def _kind(module: nn.Module) -> Any:
    return type(module), tuple((name, tuple(value.shape)) for name, value in module.named_parameters())


def _watched(
    model: nn.Module, groups: Sequence[_Group], run: Callable[[], Any]
) -> dict[str, tuple[Any, Any]]:
    """The first arguments of modules around lists; the lists note what their members are called with."""
    calls: dict[str, tuple[Any, Any]] = {}
    streams = Streams(next(model.parameters()).device)
    outer = {name for group in groups for name in _above(group.names[0])}
    states: list[Any] = []
    members = {name: model.get_submodule(name) for group in groups for name in group.names}
    again = False

    def first(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in calls:
                calls[name] = map_tensors((args, kwargs), outline)

        return hook

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(streams.capture(TORCH)[0])

    def after(group: _Group, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            now = streams.capture(TORCH)[0]
            group.draws |= not all(map(torch.equal, states.pop(), now))
            if not again:
                group.note(name, (args, kwargs), result)

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name in outer:
            hooked = model.get_submodule(name)
            stack.callback(hooked.register_forward_pre_hook(first(name), with_kwargs=True).remove)
        for group in groups:
            for name in group.names:
                member = members[name]
                group.draws |= any(isinstance(each, DROPOUTS) for each in member.modules())
                stack.callback(member.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(member.register_forward_hook(after(group, name), with_kwargs=True).remove)
        run()
        inside = [each for member in members.values() for each in member.modules()]
        if not all(each.training for each in inside):  # do they draw random numbers in training?
            again = True
            with in_mode(True, inside):
                try:
                    run()
                except FATAL:
                    raise
                except Exception:
                    for group in groups:
                        group.draws = True
    return calls


def outline(tensor: Tensor) -> Tensor:
    """The shape of a floating-point tensor, without its values; a copy of any other one."""
    return torch.empty_like(tensor, device="meta") if tensor.is_floating_point() else tensor.detach().clone()


def _above(name: str) -> list[str]:
    """The modules that hold it, the innermost first; the model is the last."""
    steps = name.split(".")
    return [".".join(steps[:count]) for count in reversed(range(len(steps)))]


def _around(name: str, calls: Mapping[str, Any]) -> str | None:
    """The innermost module around it that was called."""
    return next((each for each in _above(name) if each in calls), None)


def _why_not(
    model: nn.Module, name: str, groups: Sequence[_Group], size: int, owners: Mapping[int, Sequence[str]],
    why: Callable[[str], str], leaking: Collection[str],
) -> str:  # fmt: skip
    """Why it need not be tried."""
    module = model.get_submodule(name)
    count = len(groups[0].names)
    inside = [each for each, _ in model.named_modules() if is_in(each, name)]
    reason = next(filter(None, (why(each) for each in inside)), "")
    fault = next((group.fault for group in groups if group.fault), "")
    if reason or fault:
        return reason or fault
    if count < size:
        return f"its {count} experts are fewer than the {size} ranks"
    if any(len(group.names) != count for group in groups):
        return "its lists of experts have several lengths"
    if any(each in leaking for each in inside):
        return "tensors get out of it by another way than its result"
    if hooked := hooked_in(model, name):
        return f"{hooked} has hooks"
    values = list(module.parameters())
    if any(
        type(value) is not nn.Parameter or value.dtype not in PLAIN or not value.dim() for value in values
    ):
        return "its weights are no plain floating-point numbers with dimensions"
    if any(len(owners[id(value)]) > 1 for value in values):
        return "modules in it share parameters"
    return ""


def hooked_in(model: nn.Module, name: str) -> str:
    """A module inside of another one that has hooks; empty if none has."""
    for each, module in model.named_modules():
        if each != name and is_in(each, name) and is_hooked(module):
            return each.removeprefix(f"{name}.")
    return ""
