"""A trial of an optimizer: does it update a part of a weight as it would update that part of the whole?"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict, defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    if type(optimizer).__module__.startswith("torch.optim."):
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
    like = next(p for group in optimizer.param_groups for p in group["params"])
    random = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(SIDE, SIDE, generator=random).to(like) for _ in range(STEPS + 1))
    whole = _updated(optimizer, start, gradients)
    for dim in (0, 1):
        for number, part in enumerate(whole.chunk(2, dim)):
            own = [each.chunk(2, dim)[number].contiguous() for each in gradients]
            found = _updated(optimizer, start.chunk(2, dim)[number].contiguous(), own)
            if not torch.allclose(found, part, rtol=1e-3, atol=1e-6):
                return False
    return True


def _updated(optimizer: Optimizer, start: Tensor, gradients: list[Tensor]) -> Tensor:
    """A weight after steps of an optimizer like this one, which stays as it is."""
    other: Any = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name.endswith("hooks"):
            setattr(other, name, OrderedDict())
        elif isinstance(value, dict):
            setattr(other, name, dict(value))
    weight = torch.nn.Parameter(start.clone())
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    other.param_groups, other.state = [{**copy.deepcopy(settings), "params": [weight]}], defaultdict(dict)
    with torch.random.fork_rng(devices=[start.device] if start.is_cuda else []):
        for gradient in gradients:
            weight.grad = gradient.clone()
            type(optimizer).step(other)  # schedulers set a step of their own on an optimizer
    return weight.detach()
