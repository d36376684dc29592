"""Trials of optimizers on small weights: does an update look at one number, a whole weight, or several weights?

Where ranks have parts of a weight, or some of the weights, an optimizer sees these alone. One that updates each number
for itself computes the same as in one process (SGD, Adam). One that looks at a whole weight (LAMB, Muon, Adafactor) is
given whole ones, see ``whole_updates``. One that looks at several weights at once (LBFGS, D-Adaptation, Prodigy, a
clipping by the norm of all gradients) needs all of them on one rank.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.torch.offload.partial_steps import in_calls
from weft.torch.tensors.marks import WRAPPED
from weft.torch.tensors.pytree import CONSTANTS

log = logging.getLogger("weft")

OF_WHOLE_WEIGHTS = re.compile("adafactor|lamb|lars|muon|novograd|shampoo|soap|lbfgs", re.IGNORECASE)
"""Names of optimizers whose update of a number depends on the whole weight: a norm, rows and columns, a root."""
SIDE = 8
SCALES = (1.0, 0.03, 20.0, 0.3, 5.0, 0.01, 1.0, 2.0, 50.0, 0.1, 1.0, 0.5)
"""The sizes of the gradients of a trial's steps, so many that warm-ups of ten steps end. They differ, so that bounds
are met, and that what divides by a norm does not only scale all that came before."""
PRECISION = 1e-7
"""In double precision trials that compute the same differ by less, relative to the largest update."""
LARGE = 1 << 20
"""Tensors that an optimizer keeps outside of its states are left out of trials if they have more elements."""

_known: WeakKeyDictionary[Optimizer, dict[Any, bool | None]] = WeakKeyDictionary()
"""The results of each optimizer's trials; None where one is no answer."""


class _RandomNumbers(Exception):
    """The optimizer draws random numbers, so that two trials differ anyway."""


def updates_parts_alike(optimizer: Optimizer) -> bool:
    """True if each rank may give the optimizer a part of a weight.

    PyTorch's own are known by their names. Others, whose names say nothing, are tried on a small weight, whole and in
    halves, with the optimizer's own settings. One that cannot be tried is taken to be right, with a warning.
    """
    if any(OF_WHOLE_WEIGHTS.search(kind.__name__) for kind in type(optimizer).__mro__):
        return False
    return is_of_torch(optimizer) or _result(_halves_are_alike, optimizer) is not False


def updates_weights_alone(optimizer: Optimizer) -> bool:
    """True if the optimizer computes the same where some weights are updated after the others.

    PyTorch's own do, but for LBFGS. Others are tried on two small weights, at once and each by itself: by an optimizer
    of its own, and in a call of one optimizer, which may count its calls. One that cannot be tried is taken not to.
    """
    if is_of_torch(optimizer):
        return not isinstance(optimizer, torch.optim.LBFGS)
    return all(_result(trial, optimizer) is True for trial in (_weights_are_alone, _calls_are_alike))


def looks_at_several(optimizer: Optimizer) -> bool:
    """True if a trial has shown that the update of a weight depends on others; see :func:`updates_weights_alone`.

    One that cannot be tried is taken not to, with a warning.
    """
    if is_of_torch(optimizer):
        return isinstance(optimizer, torch.optim.LBFGS)
    return _result(_weights_are_alone, optimizer) is False


def is_of_torch(optimizer: Optimizer) -> bool:
    """True if it is one of PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _result(trial: Callable[[_Way], bool], optimizer: Optimizer) -> bool | None:
    """The result of a trial; None if the optimizer cannot be tried, with a warning."""
    results = _known.setdefault(optimizer, {})
    if trial not in results:
        results[trial] = None  # also while it is tried, which is a step
        try:
            results[trial] = _tried(trial, optimizer)
        except Exception as error:
            log.warning(
                "%s is not one of PyTorch's, and cannot be tried on %s (%r): it is wrong where ranks have some of the "
                "weights, or parts of them, if its update of a number depends on others, by a norm, say",
                type(optimizer).__name__, TRIED_ON[trial], error,
            )  # fmt: skip
    return results[trial]


def _tried(trial: Callable[[_Way], bool], optimizer: Optimizer) -> bool:
    """True if a trial is, with the settings of each group, in double precision, or in the parameters' type if that is
    an error."""
    own = next(p.dtype for group in optimizer.param_groups for p in group["params"])
    for dtype in (torch.float64, own):
        ways = [
            _Way(optimizer, settings, dtype, one_way, _first_state(optimizer, parameters))
            for settings, parameters in _settings(optimizer)
            for one_way in (False, True)
        ]
        try:
            return all(map(trial, ways))
        except Exception as error:
            if dtype == own or isinstance(error, _RandomNumbers):
                raise
    raise AssertionError("the last trial returns or raises")


def _settings(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """The settings of groups, each with parameters; of several that differ by numbers alone (rates) those of one.

    Muon's script gives the matrices to one group, and the others to a group that says ``use_muon=False``.
    """
    found: dict[str, tuple[dict[str, Any], list[Tensor]]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        kind = {
            key: value for key, value in settings.items() if isinstance(value, bool) or _number(value) is None
        }
        found.setdefault(repr(kind), (settings, group["params"]))
    return list(found.values())


def _first_state(optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Numbers that the optimizer has kept for a parameter since it was made, before any step: APOLLO's seeds."""
    entries = [optimizer.state[each] for each in parameters[:1] if each in optimizer.state]
    return next((dict(e) for e in entries if all(isinstance(value, CONSTANTS) for value in e.values())), {})


class _Way(NamedTuple):
    """Settings and gradients of a trial.

    ``one_way``: the gradients have a direction in common, as D-Adaptation needs it to change its rate. Else they are
    orthogonal to the matrix, which AdamP asks for. ``state``: of each weight, at the start.
    """

    optimizer: Optimizer
    settings: dict[str, Any]
    dtype: torch.dtype
    one_way: bool
    state: dict[str, Any]

    def drawn(self) -> list[Tensor]:
        """A small matrix and gradients of it, on the device of the optimizer's parameters.

        The first parameter may be another rank's, or a share: only what it says of itself is asked.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        device = next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))
        random = torch.Generator().manual_seed(0)
        start, *gradients = (
            torch.randn(SIDE, SIDE, generator=random, dtype=torch.float64) for _ in range(len(SCALES) + 1)
        )
        for scale, gradient in zip(SCALES, gradients, strict=True):
            gradient += 1.0 if self.one_way else -(gradient * start).sum() / start.square().sum() * start
            gradient *= scale
        return [each.to(device, self.dtype) for each in (start, *gradients)]

    def drawn_for_two(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Two small matrices, and gradients of both for each step."""
        first, *gradients = self.drawn()
        others = [3 * each.t().contiguous() for each in gradients[::-1]]
        return [first, 3 * first.t().contiguous()], [
            list(pair) for pair in zip(gradients, others, strict=True)
        ]


def _halves_are_alike(way: _Way) -> bool:
    """True if some steps on a matrix, and on its halves along both dims, give the same numbers."""
    start, *gradients = way.drawn()
    whole = _updated(way, [start], [[each] for each in gradients])
    for dim in (0, 1):
        starts, expected = start.chunk(2, dim), whole.weights[0].chunk(2, dim)
        for half in range(2):
            own = [[each.chunk(2, dim)[half].contiguous()] for each in gradients]
            found = _updated(way, [starts[half].contiguous()], own)
            if not _is_same(found.weights[0], expected[half], starts[half], 1e-3, 1e-6):
                return False
            if not _are_same(found.settings, whole.settings):
                return False
    return True


def _weights_are_alone(way: _Way) -> bool:
    """True if some steps on two matrices at once, and on each by itself, give the same numbers."""
    starts, both = way.drawn_for_two()
    at_once = _updated(way, starts, both)
    if not all(map(torch.equal, at_once.weights, _updated(way, starts, both, seed=1).weights)):
        raise _RandomNumbers("it draws random numbers")
    for number, start in enumerate(starts):
        found = _updated(way, [start], [[each[number]] for each in both])
        if not _is_same(found.weights[0], at_once.weights[number], start, 1e-5, 1e-7):
            return False
        if not _are_same(found.settings, at_once.settings):
            return False
    return True


def _calls_are_alike(way: _Way) -> bool:
    """True if some steps on two matrices at once, and in a call for each, give the same numbers."""
    starts, both = way.drawn_for_two()
    at_once, found = (_updated(way, starts, both, in_a_call=number) for number in (2, 1))
    return all(
        _is_same(mine, theirs, start, 1e-5, 1e-7)
        for mine, theirs, start in zip(found.weights, at_once.weights, starts, strict=True)
    )


TRIED_ON: dict[Any, str] = {
    _halves_are_alike: "a part of a weight",
    _weights_are_alone: "single weights",
    _calls_are_alike: "some weights after the others",
}


def _is_same(found: Tensor, expected: Tensor, start: Tensor, rtol: float, atol: float) -> bool:
    """True if both trials have computed the same; the tolerances are for types of fewer bits than double precision."""
    if found.dtype != torch.float64:
        return torch.allclose(found, expected, rtol, atol)
    moved = float((expected - start).abs().max())
    return float((found - expected).abs().max()) <= PRECISION * moved


def _are_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """True if two trials have left the same numbers among an optimizer's settings.

    D-Adaptation and Prodigy keep there what they sum over all weights. It changes the weights after many steps only.
    """
    pairs = [(_number(found.get(name)), _number(value)) for name, value in expected.items()]
    return all(a is None or b is None or math.isclose(a, b, rel_tol=PRECISION) for a, b in pairs)


def _number(value: Any) -> float | None:
    """The value, if it is a number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None


class _Outcome(NamedTuple):
    """The results of a trial: the weights, and the settings of their group."""

    weights: list[Tensor]
    settings: dict[str, Any]


def _updated(
    way: _Way,
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    seed: int = 0,
    in_a_call: int = 2,
) -> _Outcome:
    """The outcome of steps of an optimizer like this one, which stays as it is.

    ``in_a_call``: so many weights have their gradients in a call of its ``step``.
    """
    optimizer = way.optimizer
    other: Any = copy.copy(optimizer)
    kept = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(optimizer): other}
    for name, value in vars(optimizer).items():
        if name.endswith("hooks"):
            setattr(other, name, OrderedDict())
        elif name not in ("param_groups", "state", WRAPPED):
            _give(other, name, value, kept)
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    other.param_groups = [{**copy.deepcopy(way.settings), "params": weights}]
    of_all = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    other.state = defaultdict(dict, copy.deepcopy(of_all))
    other.state.update((weight, dict(way.state)) for weight in weights if way.state)
    with torch.random.fork_rng(devices=[starts[0].device] if starts[0].is_cuda else []):
        (torch.cuda.manual_seed if starts[0].is_cuda else torch.default_generator.manual_seed)(seed)
        for step in gradients:
            # schedulers set a step of their own on an optimizer
            with in_calls(other, "a trial", lambda: type(optimizer).step(other)) as call:
                for first in range(0, len(weights), in_a_call):
                    for number, (weight, gradient) in enumerate(zip(weights, step, strict=True)):
                        weight.grad = gradient.clone() if first <= number < first + in_a_call else None
                    call()
    return _Outcome([weight.detach() for weight in weights], other.param_groups[0])


def _give(other: Any, name: str, value: Any, kept: dict[int, Any]) -> None:
    """Give an attribute to a trial's optimizer, a copy of it where its step might change it."""
    if isinstance(value, (*CONSTANTS, torch.dtype)) or callable(value):
        vars(other)[name] = value
    elif isinstance(value, dict):
        vars(other)[name] = dict(value)
    elif not (isinstance(value, Tensor) and value.numel() > LARGE):
        try:
            vars(other)[name] = copy.deepcopy(value, dict(kept))
        except Exception as error:  # its step fails if it needs it
            log.debug("%s of the optimizer cannot be copied for a trial: %r", name, error)
