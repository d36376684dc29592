"""The record of a traced step: what each module did, and what is noted while the module's code runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from weft.torch.calls.attributes import Attribute
from weft.torch.pytorch.private import tables_of
from weft.torch.tensors.pytree import tensors_in
from weft.torch.trace.operations import Operations


@dataclass
class Share:
    """The cost of a part of a module's own code in the last pass, and what autograd keeps of it."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    largest_bytes: int = 0


@dataclass
class Record:
    """The cost of one module. Times and bytes are its own, without the modules it called.

    ``shares``: parts of its own code, by the order of the module that was called last before a part ran, which may be
    the module itself. A model that computes its loss has a part after its last module.
    """

    name: str
    module: nn.Module
    order: float = -1
    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    saved_bytes: int = 0
    largest_bytes: int = 0
    """Of the tensors that autograd keeps of it, the largest."""
    recomputed_bytes: int = 0
    """Of the results that an activation checkpoint that ends in it computes again before its backward pass."""
    output_bytes: int = 0
    operations: int = 0
    describable: bool = True
    parameters_used: dict[int, float] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    shares: dict[float, Share] = field(default_factory=dict)

    def share(self, order: float) -> Share:
        """The part of its own code that runs after the module of that order was called."""
        return self.shares.setdefault(order, Share())

    def keep(self, size: int, share: Share | None = None) -> None:
        """Count a tensor of so many bytes that autograd keeps; ``share``: for this part of its own code, too."""
        self.saved_bytes += size
        self.largest_bytes = max(self.largest_bytes, size)
        if share is not None:
            share.saved_bytes += size
            share.largest_bytes = max(share.largest_bytes, size)

    def spread(self) -> list[tuple[float, Record]]:
        """The cost of each part of its own code, by where it runs; the sum is what the module costs.

        Times are divided as they were in the last pass, because single passes are less sure than `forward_s`. A
        backward pass that was not timed is divided as the forward pass.
        """
        if not self.shares:
            return [(self.order, self)]
        ahead, back, kept = (
            {order: float(getattr(share, name)) for order, share in self.shares.items()}
            for name in ("forward_s", "backward_s", "saved_bytes")
        )
        of_forward = _proportions(ahead)
        of_backward = _proportions(back) if any(back.values()) else of_forward
        of_kept = _proportions(kept)
        largest = max(share.largest_bytes for share in self.shares.values()) or 1
        return [
            (
                order,
                replace(
                    self,
                    forward_s=self.forward_s * of_forward[order],
                    backward_s=self.backward_s * of_backward[order],
                    input_s=self.input_s * of_backward[order],
                    weight_s=self.weight_s * of_backward[order],
                    saved_bytes=round(self.saved_bytes * of_kept[order]),
                    largest_bytes=round(self.largest_bytes * share.largest_bytes / largest),
                ),
            )
            for order, share in self.shares.items()
        ]


def _proportions(parts: dict[float, float]) -> dict[float, float]:
    """Each part as a share of the sum; all in the first one if there is nothing."""
    whole = sum(parts.values())
    first = min(parts)
    return {order: part / whole if whole else float(order == first) for order, part in parts.items()}


@dataclass
class Trace:
    """The records by name, in order of first call; modules that were not called stand where they are registered.

    Args:
        records: What each module did.
        leaking: Modules out of which tensors get by another way than their result and what they are given (an
            attribute, a hook, a closure). They must be opened.
        readers: Modules that use what others have put into lists, dicts and objects.
        whole: Modules that must not be opened, with the reason.
        function_calls: Autograd functions that call modules, and the modules that each was given and called. These
            modules must lie together.
        written_buffers: Buffers that the step wrote.
        replaced_buffers: Buffers that the step replaced by other tensors.
        attributes: Attributes of modules that the step wrote.
        operations: What ran, and on whose results.
        around: What the step itself costs, outside of the model.
        numpy: Whether the step draws from NumPy's global random state.
        seconds: How long the trace took.
        written_parameters: Parameters that a forward pass writes, and whether autograd keeps each for going backward.
        toggled: Parameters of which the step says whether they need gradients.
        users: The modules whose own code uses a parameter or buffer, by its name; None stands for the step's code.
        hooks: Forward hooks that write what their module computes with, by the module's name; see ``calls.own_hooks``.
        cast: The dtypes that the forward pass gave to parameters of another dtype, by name.
    """

    records: dict[str, Record]
    leaking: set[str]
    whole: dict[str, str]
    function_calls: list[tuple[str, set[str]]]
    written_buffers: set[str]
    replaced_buffers: set[str]
    attributes: list[Attribute]
    operations: Operations
    around: Record
    numpy: bool
    seconds: float
    written_parameters: dict[str, bool] = field(default_factory=dict)
    toggled: set[str] = field(default_factory=set)
    users: dict[str, set[str | None]] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    hooks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)


def has_other_parameters(module: nn.Module, own: Mapping[int, str]) -> bool:
    """True if the module has parameters that are not in ``own``, which has names by id."""
    tables = (tables_of(part)[0] for part in module.modules())
    return any(one is not None and id(one) not in own for table in tables for one in table.values())


@dataclass
class Made:
    """The origin of a tensor: the module whose code made it, and the modules that returned it.

    ``left``: the modules that have put it into a container or object that they were given. ``placed``: the tensor may
    lie on one rank alone.
    """

    maker: str
    returned: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    placed: bool = False


class Received:
    """The tensors that a call of a module can use and that were made outside of the module."""

    def __init__(self, record: Record, inputs: Any) -> None:
        self.record = record
        self._inputs = inputs
        self._known: set[int] = set()

    def has(self, tensor: Tensor) -> bool:
        """True if weft hands the tensor to the call: an argument, or an attribute that the code around it has set."""
        if not self._known:
            self._known = {id(one) for one in tensors_in(self._inputs, attributes=True)}
        if id(tensor) not in self._known:
            attributes = (value for module in self.record.module.modules() for value in vars(module).values())
            self._known.update(id(value) for value in attributes if isinstance(value, Tensor))
        return id(tensor) in self._known


@dataclass
class Running:
    """An autograd function that runs. ``caller``: the module whose code called it; ``given``: the modules in its
    arguments, by id; ``called``: the names of those that it called."""

    name: str
    caller: Record
    given: set[int]
    called: set[str] = field(default_factory=set)


def contains(outer: str, inner: str, at_top: bool) -> bool:
    """True if module ``outer`` is ``inner`` or has it inside; nothing but the step itself is at the top."""
    if at_top:
        return False
    return outer == "" or inner == outer or inner.startswith(f"{outer}.")
