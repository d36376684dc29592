"""Attributes of modules that a step writes: whose they are while microbatches are in flight together.

    written before they are read     each microbatch has its own; they change with its turn, as random states do
    read before they are written     what one microbatch leaves the next one finds: a unit that has them to itself sees
                                     microbatches in order, as with buffers; elsewhere they are refused

A unit gets those that the code around it has set as it gets its arguments, and gradients go back the same way. Those
that a unit writes go to all ranks with its result (:func:`written_values`): any code may read them, in later steps too.
Which is which is seen in the trace, where reading and writing of attributes is noted. Counters (whole numbers) stay as
they are, for in whatever order microbatches add to them, the sum is the same; so does what is made where it is missing,
and only then. The value of a counter is that of one process as long as no microbatch has waited for another rank, so
it may be used before the first module with parameters is called. What each microbatch leaves as it was is its own, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from weft.errors import PlacementError, UsageError
from weft.torch.calls.call_signature import meta_like
from weft.torch.pytorch.private import SLOT, has_memory, storage_key, tables_of, version
from weft.torch.tensors.description import Describer
from weft.torch.tensors.pytree import map_tensors, tensors_in

_ABSENT = object()
_COUNTERS = (int, str, type(None))
"""What may be read before it is written, by modules of several ranks too: counters, flags, names."""


@dataclass
class Attribute:
    """An attribute ``name`` of a ``module`` that a step has written.

    ``carried``: the step looked for the attribute before writing it. ``users``: the modules whose code used it.
    ``counter``: its value is a whole number, a text or None. ``lazy``: it is made where it is missing, and stays then.
    ``restored``: a constant that was at the end what it had been. ``valued``: its value was used, and not only added
    to; ``late``: used so after other modules had been called. ``held``: the memory of the tensors in it, and how often
    each had been written when the attribute was.
    """

    module: str
    name: str
    carried: bool
    counter: bool
    lazy: bool
    users: set[str] = field(default_factory=set)
    restored: bool = False
    valued: bool = False
    late: bool = False
    held: dict[int, int] = field(default_factory=dict)

    @property
    def in_order(self) -> bool:
        """True if a unit that has it to itself must see the microbatches in order."""
        return self.carried and not self.restored and (self.valued or not self.counter)

    @property
    def is_own(self) -> bool:
        """True if each microbatch has one for itself, if no unit has it."""
        return not self.carried or self.restored

    @property
    def is_shared(self) -> bool:
        """True if all microbatches may use the one that there is, in whatever order."""
        return self.lazy or (self.counter and not self.late)

    @property
    def place(self) -> tuple[str, str]:
        return self.module, self.name

    def inside(self, unit: str) -> bool:
        """True if nothing but the unit uses it."""
        users = (self.module, *self.users)
        return not unit or all(user == unit or user.startswith(f"{unit}.") for user in users)


@contextmanager
def note_attributes(root: nn.Module, user: Callable[[], str]) -> Iterator[list[Attribute]]:
    """A list of the attributes of modules in ``root`` that are written inside; it is filled at the end.

    ``user``: the module whose code runs. Not for models with compiled modules: the compiler would see the notes.
    """
    found: list[Attribute] = []
    modules = {id(module): module for module in root.modules()}
    names = {id(module): name for name, module in root.named_modules()}
    notes: dict[tuple[int, str], _Notes] = {}
    reads: list[tuple[tuple[int, str], str, Any, str, int]] = []
    """Those of attributes that were not written by then: nearly all, so that no more is done for them."""
    called = [0]
    with_parameters: set[int] = set()

    def note(module: nn.Module, name: str, what: str, value: Any) -> None:
        key = id(module), name
        if key[0] not in names:
            return
        if key not in notes:
            if what != "write":
                reads.append((key, what, value, user(), called[0]))
                return
            before = [read for of, *read in reads if of == key]
            notes[key] = _Notes(*(before[0][:2] if before else (what, value)))
            for read in before:
                notes[key].add(*read)
        notes[key].add(what, value, user(), called[0])

    def get(module: nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            note(module, name, "missing", _ABSENT)
            raise
        if name[:2] != "__":  # what its class has is its own only from the first writing on
            note(
                module,
                name,
                "read" if name in object.__getattribute__(module, "__dict__") else "missing",
                value,
            )
        return value

    def put(module: nn.Module, name: str, value: Any) -> None:
        original(module, name, value)
        if id(module) in names and not isinstance(value, (nn.Parameter, nn.Module)):
            note(module, name, "write", value)

    def look(module: nn.Module, given: Any, result: Any) -> None:
        if id(module) in with_parameters or any(True for _ in module.parameters()):
            with_parameters.add(id(module))
            called[0] += 1

    original = nn.Module.__setattr__
    nn.Module.__setattr__ = put  # type: ignore[method-assign,assignment]
    nn.Module.__getattribute__ = get  # type: ignore[method-assign,assignment]
    handle = register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
        del nn.Module.__getattribute__
        for (number, name), noted in notes.items():
            tables = tables_of(modules[number])
            if noted.written and name != SLOT and not any(name in table for table in tables):
                found.append(noted.attribute(names[number], name))


def _is_constant(value: Any) -> bool:
    """True for a name, a number, and a list or tuple of such, as the active adapters of a layer are."""
    return isinstance(value, _COUNTERS) or (
        isinstance(value, (list, tuple)) and all(map(_is_constant, value))
    )


class _Notes:
    """The reads and writes of one attribute. Reading only to write at once, as ``+=`` does, is no use of the value."""

    def __init__(self, first: str, value: Any) -> None:
        self.first, self.value = first, value
        self.before, self.users = value, set[str]()
        self.written = False
        self._reads: list[int] = []
        """For each use of its value, how many modules had been called; the last one may be for a writing."""
        self._before_writing = False
        self._held: dict[int, int] = {}

    def add(self, what: str, value: Any, user: str, called: int) -> None:
        self.users.add(user)
        if what != "write":
            self._reads.append(called)
        else:
            if self._before_writing and self._reads[-1] == called:
                self._reads.pop()
            self.written, self.value = True, value
            self._held = {storage_key(one): version(one) for one in tensors_in(value) if has_memory(one)}
        self._before_writing = what != "write"

    def attribute(self, module: str, name: str) -> Attribute:
        """Of all that was noted."""
        carried, counter = self.first != "write", isinstance(self.value, _COUNTERS)
        same = (
            type(self.before) is type(self.value) and _is_constant(self.value) and self.before == self.value
        )
        restored = carried and same
        lazy = self.first == "missing"
        return Attribute(
            module,
            name,
            carried,
            counter,
            lazy,
            self.users,
            restored,
            bool(self._reads),
            any(self._reads),
            self._held,
        )


def own(attributes: Sequence[Attribute], units: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Module and name of the attributes that each microbatch has for itself.

    Raises:
        PlacementError: An attribute is carried from microbatch to microbatch, and no unit has it to itself.
    """
    shared = [each for each in attributes if not any(each.inside(unit) for unit in units)]
    faults = [each for each in shared if not (each.is_own or each.is_shared)]
    if faults:
        listed = ", ".join(f"{each.module}.{each.name}".lstrip(".") for each in faults)
        raise PlacementError(
            f"{listed} carries a value from one microbatch to the next (it is read before it is written), but is used "
            "on several partitions, where microbatches overlap. Put the modules that use it on one: "
            "weft.set_partition(module, index), or make it a buffer of a module there. A whole number may be used "
            "before the first module is called"
        )
    return tuple(each.place for each in shared if each.is_own)


def written_values(unit: nn.Module, noted: Sequence[Attribute]) -> dict[str, Any]:
    """Values, by name, that a call of ``unit`` has written into attributes of its modules, for the other ranks.

    Left out is what goes from microbatch to microbatch, and what cannot be sent to other ranks.
    """
    found: dict[str, Any] = {}
    for each in noted:
        value = vars(unit.get_submodule(each.module)).get(each.name, _ABSENT)
        if each.carried or value is _ABSENT:
            continue
        with suppress(UsageError):
            Describer(()).describe(value)
            found[f"{each.module}.{each.name}"] = value
    return found


def spot_of(unit: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The attributes of a module, and the one of them that :func:`written_values` calls by this name."""
    module, _, attribute = name.rpartition(".")
    return vars(unit.get_submodule(module)), attribute


class Given:
    """The attributes inside of a unit that the code around it sets, for one call of the unit."""

    def __init__(self, spots: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._spots = [spot for spot in spots if isinstance(spot[0].get(spot[1]), Tensor)]
        self.tensors = [attributes[name] for attributes, name in self._spots]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the attributes are ``tensors``, which this rank has; what the unit sets itself stays."""
        for (attributes, name), tensor in zip(self._spots, tensors, strict=True):
            attributes[name] = tensor
        try:
            yield
        finally:
            for (attributes, name), tensor, before in zip(self._spots, tensors, self.tensors, strict=True):
                if attributes.get(name) is tensor:
                    attributes[name] = before


class Own:
    """The attributes that each microbatch has for itself on this rank.

    They are taken out when a microbatch loses the turn, and put back when it gets the turn. So is whether parameters
    need gradients, where the step sets that itself.
    """

    def __init__(self) -> None:
        self._spots: list[tuple[dict[str, Any], str]] = []
        self._known: set[tuple[int, str]] = set()
        self._trained: list[nn.Parameter] = []
        self._runs = False
        self.first: list[Any] = []
        """What they were when the step began: microbatches begin with that."""
        self._left: list[tuple[int, Any]] = []
        """What the last microbatch that wrote them has left, and its index."""

    def __bool__(self) -> bool:
        return bool(self._spots or self._trained)

    def add(self, attributes: dict[str, Any], name: str) -> None:
        """From now on the attribute of this name, one of a module's ``attributes``, is each microbatch's own."""
        if (id(attributes), name) in self._known:
            return
        self._known.add((id(attributes), name))
        self._spots.append((attributes, name))
        if self._runs:
            self.first.append(attributes.get(name, _ABSENT))
            self._left.append((-1, self.first[-1]))

    def add_trained(self, parameter: nn.Parameter) -> None:
        """From now on it is each microbatch's own whether the parameter needs a gradient."""
        self._trained.append(parameter)

    def begin(self) -> None:
        """A step begins."""
        self.first = self.take()
        self._left = [(-1, value) for value in self.first]
        self._runs = True

    def leave(self, index: int, rank: int) -> None:
        """A microbatch has ended on this ``rank``."""
        for number, value in enumerate(self.take()):
            if value is not self.first[number] and index > self._left[number][0]:
                self._left[number] = index, map_tensors(value, lambda one: as_left(one, rank))

    def end(self) -> None:
        """The step is over: they are as one process leaves them."""
        self.put([value for _, value in self._left])
        self.first, self._left, self._runs = [], [], False

    @contextmanager
    def as_forward_left(self) -> Iterator[None]:
        """Around a backward pass: activation checkpoints in it run modules again, which write what they wrote before.

        That was sent to other ranks, so it stays, and not what is equal to it and has no value.
        """
        before = [(spot, spot[0].get(spot[1])) for spot in self._spots]
        yield
        for (attributes, name), value in before:
            now = attributes.get(name)
            if now is not value and _has_values(value) and _shapes(now) == _shapes(value):
                attributes[name] = value

    def take(self) -> list[Any]:
        """The present values."""
        values = [attributes.get(name, _ABSENT) for attributes, name in self._spots]
        return [*(parameter.requires_grad for parameter in self._trained), *values]

    def put(self, values: Sequence[Any]) -> None:
        """Let them be what :meth:`take` gave; those that were added since are what they were when the step began."""
        values = [*values, *self.first[len(values) :]]
        for parameter, needed in zip(self._trained, values, strict=False):
            parameter.requires_grad = needed
        for (attributes, name), value in zip(self._spots, values[len(self._trained) :], strict=True):
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value


def _has_values(tree: Any) -> bool:
    return any(each._weft_value is not None for each in tensors_in(tree))  # type: ignore[attr-defined]


def _shapes(tree: Any) -> list[Any]:
    return [each.shape for each in tensors_in(tree)]


def as_left(tensor: Tensor, rank: int) -> Tensor:
    """A tensor that an attribute holds when a step is over, on ``rank``: what it has become by writing in place, and
    no data where another rank alone has that."""
    value = tensor._weft_value  # type: ignore[attr-defined]
    if value is None:
        return tensor
    left: Tensor = value.data(tensor)
    if value.owner != rank and left.device.type != "meta":
        left = meta_like(left)
    left._weft_value = value  # type: ignore[attr-defined]
    return left


__all__ = ["Attribute", "Given", "Own", "as_left", "note_attributes", "own", "spot_of", "written_values"]
