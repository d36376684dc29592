"""Shares of an optimizer's state: for each parameter, one replica keeps the state and updates the parameter.

This is stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5.1), with whole parameters instead of slices of
a flat tensor. So every optimizer of ``torch.optim`` computes the same as without sharding, also one that looks at a
whole parameter (LAMB, Adafactor). See ``docs/design/sharding.md``.

Ranks that have a part of a weight update that part alone: `updates_parts_alike` tries if an optimizer allows it. For
others see ``whole_updates``.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Container, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from weft.torch.tensor_parallel import cut_of
from weft.torch.tensors.pytree import CONSTANTS
from weft.transport.private_c10d import broadcast_all

BUCKET_BYTES = 25 << 20
"""The most bytes of parameters that travel in one message."""


class Shares:
    """The parameters that each replica updates, by their number in the optimizer.

    ``group``: the ranks that hold the same part of the model; ``replica``: this rank's place in it.
    """

    def __init__(self, group: dist.ProcessGroup, replica: int, replicas: int) -> None:
        self.replica = replica
        self.replicas = replicas
        self._group = group
        self._replica_of: list[int] = []
        self._own: set[int] = set()
        self._load = {trains: [0] * replicas for trains in (True, False)}

    def extend(
        self, parameters: Sequence[Tensor], local: Sequence[bool], experts: Container[int] = ()
    ) -> None:
        """Give each new parameter to a replica: the largest first, each to the replica with the least so far.

        All replicas decide alike, because names, sizes and order are the same; so do ranks that have parts of the
        parameters, by the sizes of the whole ones. Frozen parameters are balanced apart, so
        that nothing has to move when they are trained later. Parameters of other partitions (not ``local``) count for
        nothing; nor do ``experts``, by their ids, of which each replica has and updates its own.
        """
        known = len(self._replica_of)
        new = range(known, len(parameters))
        self._replica_of += [0] * len(new)
        sizes = {number: _numbers(parameters[number]) for number in new}
        for number in sorted(new, key=lambda n: (-sizes[n], n)):
            if id(parameters[number]) in experts:
                self._replica_of[number] = self.replica
                self._own.add(number)
            elif local[number]:
                load = self._load[parameters[number].requires_grad]
                self._replica_of[number] = load.index(min(load))
                load[self._replica_of[number]] += sizes[number]

    def has(self, number: int) -> bool:
        """True if this replica updates the parameter of that number."""
        return self.replica_of(number) == self.replica

    def replica_of(self, number: int) -> int:
        """The replica that updates the parameter of that number."""
        return self._replica_of[number]

    def exchange(self, parameters: dict[int, Tensor]) -> None:
        """Bring each parameter (by number) from the replica that updates it to all replicas; collective."""
        for replica in range(self.replicas):
            mine = [
                parameter.detach()
                for number, parameter in parameters.items()
                if number not in self._own and self._replica_of[number] == replica
            ]
            if mine:
                broadcast_all(self._group, mine, BUCKET_BYTES, replica)


def tensors_and_plain(entries: dict[Any, dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's states by parameter, as tensors and other values by ``parameter/key``."""
    flat = {f"{number}/{key}": value for number, entry in entries.items() for key, value in entry.items()}
    tensors = {path: value for path, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {path: value for path, value in flat.items() if path not in tensors}


def by_parameter(flat: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The inverse of :func:`tensors_and_plain`, in the order of the parameters."""
    merged: dict[int, dict[str, Any]] = {}
    for path, value in flat.items():
        number, _, key = path.partition("/")
        merged.setdefault(int(number), {})[key] = value
    return {number: merged[number] for number in sorted(merged)}


def _numbers(parameter: Tensor) -> int:
    """The number of elements of the full parameter."""
    how = cut_of(parameter)
    return parameter.numel() if how is None else math.prod(how.shape)


log = logging.getLogger("weft")

OF_WHOLE_WEIGHTS = re.compile("adafactor|lamb|lars|muon|novograd|shampoo|soap|lbfgs", re.IGNORECASE)
"""Names of optimizers whose update of a number depends on the whole weight: a norm, rows and columns, a root."""
SIDE, STEPS = 8, 3
_known: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()


def updates_parts_alike(optimizer: Optimizer) -> bool:
    """True if each rank may give the optimizer a part of a weight.

    PyTorch's own are known by their names. Others, whose names say nothing, are tried on a small weight, whole and in
    halves, with the optimizer's own settings. One that cannot be tried is taken to be right, with a warning.
    """
    if any(OF_WHOLE_WEIGHTS.search(kind.__name__) for kind in type(optimizer).__mro__):
        return False
    if _is_of_torch(optimizer):
        return True
    if optimizer not in _known:
        _known[optimizer] = True  # also while it is tried, which is a step
        try:
            _known[optimizer] = _tried(optimizer)
        except Exception as error:
            log.warning(
                "%s is not one of PyTorch's, and cannot be tried on a part of a weight (%r): if its update of a number "
                "depends on other numbers of the weight, by a norm, say, it is wrong where ranks have parts",
                type(optimizer).__name__, error,
            )  # fmt: skip
    return _known[optimizer]


def _tried(optimizer: Optimizer) -> bool:
    """True if some steps on a matrix, and on its halves along both dims, give the same numbers."""
    start, *gradients = _drawn(optimizer)
    (whole,) = _updated(optimizer, [start], [[each] for each in gradients])
    for dim in (0, 1):
        for number, part in enumerate(whole.chunk(2, dim)):
            own = [[each.chunk(2, dim)[number].contiguous()] for each in gradients]
            (found,) = _updated(optimizer, [start.chunk(2, dim)[number].contiguous()], own)
            if not torch.allclose(found, part, rtol=1e-3, atol=1e-6):
                return False
    return True


def _is_of_torch(optimizer: Optimizer) -> bool:
    """True if it is one of PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def updates_weights_alone(optimizer: Optimizer) -> bool:
    """True if the optimizer computes the same where some weights are updated after the others.

    PyTorch's own do, but for LBFGS. Others are tried on two small weights, at once and each by itself. One that cannot
    be tried is taken not to.
    """
    if _is_of_torch(optimizer):
        return not isinstance(optimizer, torch.optim.LBFGS)
    starts, *gradients = ([each, 3 * each.t().contiguous()] for each in _drawn(optimizer))
    try:
        both = _updated(optimizer, starts, gradients)
        alone = [
            _updated(optimizer, [start], [[each[number]] for each in gradients])[0]
            for number, start in enumerate(starts)
        ]
    except Exception as error:
        log.warning("%s cannot be tried on single weights: %r", type(optimizer).__name__, error)
        return False
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(both, alone, strict=True))


def _drawn(optimizer: Optimizer) -> list[Tensor]:
    """A small matrix and gradients of it, of the type and on the device of the optimizer's parameters.

    The first parameter may be another rank's, or a share: only what it says of itself is asked.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(SIDE, SIDE, generator=random).to(device, parameters[0].dtype) for _ in range(STEPS + 1)
    ]


def _updated(
    optimizer: Optimizer, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Weights after steps of an optimizer like this one, which stays as it is."""
    other: Any = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if isinstance(value, CONSTANTS):  # pickling leaves out what a step asks for on a GPU
            setattr(other, name, value)
        if name.endswith("hooks"):
            setattr(other, name, OrderedDict())
        elif isinstance(value, dict):
            setattr(other, name, dict(value))
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    other.param_groups, other.state = [{**copy.deepcopy(settings), "params": weights}], defaultdict(dict)
    with torch.random.fork_rng(devices=[starts[0].device] if starts[0].is_cuda else []):
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            type(optimizer).step(other)  # schedulers set a step of their own on an optimizer
    return [weight.detach() for weight in weights]
