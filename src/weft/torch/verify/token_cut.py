"""The first step of a job that cuts batches by tokens, beside a padded batch: does padding not count, and what does?

Without its padding a row gives the same only if the model and the loss look at no padding. And the weight of a
microbatch is what its loss is a mean over: all targets, those without the first of each row (a language model predicts
the next one), all tokens, or rows. Both are found before the model is split, on the rank that decides, from a few rows:

    whole    the longest row and the shortest ones, with all of their padding
    parts    the longest row; the shortest ones; each without padding

Targets of the mean losses are noted in each while the step goes forward, and sought among the step's arguments: their
number is the weight. Then losses and gradients of the parts are compared with those of the whole,
as ``whole_batch`` compares them.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.session.cut import argument_names
from weft.session.lengths import Group, Tokens, group
from weft.torch.replicas.sync_batch_norm import BatchNorm
from weft.torch.session.collectives import agree_on
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import LOSSES, MiniBatch, is_whole, named_tensors
from weft.torch.tensors.tokens import mask_of, spans_of
from weft.torch.verify.whole_batch import Incomparable, Trial, shown

log = logging.getLogger("weft")

ROWS = "the rows"
MASK = "the mask"
WITHOUT_PROOF = 'To cut by tokens without that comparison, give weight=, too, and write "verify": "off"'


@dataclass(frozen=True)
class Count:
    """A function that counts what the loss of a step is a mean over, in the step's arguments.

    Args:
        function: The step.
        tokens: Where its mask is.
        found: The tensors that have the targets, by path, each with whether the first one of a row counts; `MASK`, if
            all tokens are targets, or `ROWS`.
        ignored: The target that does not count.
    """

    function: Callable[..., Any]
    tokens: Tokens
    found: Sequence[tuple[str, bool]]
    ignored: int

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        tensors = _tensors(self.function, args, kwargs)
        numbers = {path: len(self.values(path, first, tensors, args, kwargs)) for path, first in self.found}
        if len(set(numbers.values())) > 1:
            raise UsageError(
                f"the losses of the step are means over different numbers of targets ({numbers}), which they were not "
                "in its first batch: say what a microbatch counts with @weft.step(tokens=..., weight=...)"
            )
        return next(iter(numbers.values()))

    def values(
        self, path: str, first: bool, tensors: Sequence[tuple[str, Tensor]], args: Any, kwargs: Any
    ) -> Tensor:
        """The targets, in no order."""
        if path == ROWS:
            return torch.arange(len(tensors[0][1]))
        targets = mask_of(self.tokens, tensors, args, kwargs) if path == MASK else dict(tensors)[path]
        targets = targets if first else targets[:, 1:]
        return targets[targets != (0 if path == MASK else self.ignored)].sort().values


def _tensors(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[str, Tensor]]:
    named = [*zip(argument_names(function, tuple(args)), args, strict=True), *kwargs.items()]
    return [
        found for name, argument in named if not is_whole(argument) for found in named_tensors(argument, name)
    ]


@dataclass(frozen=True)
class Verdict:
    """The finding of the first rank, for all ranks.

    ``fault``: why the step may not be cut by tokens. ``told``: why it is cut by rows instead. ``count``: the last
    arguments of `Count`, if the step does not say itself what a microbatch weighs.
    """

    fault: str = ""
    told: str = ""
    count: list[Any] = field(default_factory=list)


def prove(
    session: Session, models: Sequence[Any], function: Callable[..., Any], title: str, batch: MiniBatch,
    weight: Callable[..., Any] | None,
) -> tuple[Tokens | None, Callable[..., Any] | None]:  # fmt: skip
    """The tokens by which a step's batches are cut from now on, ``None`` for rows; and the weight of a microbatch.

    Collective over all ranks. ``batch``: that of the first step.

    Raises:
        UsageError: Padding counts, or nobody knows what the loss is a mean over.
    """
    tokens, settings = batch.cut.tokens, session.settings
    assert tokens is not None
    for name, value in (
        ("microbatches", "auto"),
        ("context_parallel_degree", settings.context_parallel_degree),
    ):
        if value != 1 and getattr(settings, name) == value:
            raise UsageError(
                f'{title} is cut by tokens, which does not go together with "{name}": {json.dumps(value)}: write '
                "another value, or leave tokens= out of @weft.step"
            )
    if session.first_inputs:
        raise UsageError(
            f"{title} is cut by tokens, for which each rank of a pipeline needs the mask, but only the first rank's "
            'inputs count: give all the same batch ("inputs": "equal"), or leave tokens= out'
        )
    normalised = [
        name for model in models for name, part in model.module.named_modules() if isinstance(part, BatchNorm)
    ]
    if normalised:
        raise UsageError(
            f"{title} is cut by tokens, but {normalised[0]} is a BatchNorm, whose statistics have padding in them: "
            "leave tokens= out, or take a LayerNorm"
        )
    proved = replace(tokens, trimmed=batch.trimmed)
    if settings.verify == "off":
        if weight is None:
            raise UsageError(
                'the weight of a microbatch is found by a comparison that "verify": "off" leaves out: say what the '
                "loss is a mean over with @weft.step(tokens=..., weight=...)"
            )
        return proved, weight
    trial = Trial(session, models, function, weight)
    text = agree_on(session, lambda: json.dumps(asdict(_judged(trial, batch, title))), "the cut by tokens")
    verdict = Verdict(**json.loads(text))
    if verdict.fault:
        raise UsageError(verdict.fault)
    if verdict.told:
        if session.rank == 0:
            log.warning("%s", verdict.told)
        return None, weight
    return proved, Count(function, proved, *verdict.count) if weight is None else weight


def _judged(trial: Trial, batch: MiniBatch, title: str) -> Verdict:
    """The verdict on a step; on the rank that decides."""
    whole, parts = _pieces(trial.function, batch)
    reason = _no_proof(trial, whole, parts)
    losses = Losses()
    try:
        seen = [] if reason else [losses.of(trial, batch, whole)]
    except Incomparable as found:
        reason = f"its first batch cannot be compared with its rows: {found}"
    if reason:
        return Verdict(told=f"{title} is cut by rows, not by tokens, because {reason}")
    begin = f"{title} cannot be cut by tokens: "
    remedy = ". Give the model the mask and the loss targets that leave padding out, or leave tokens= out"
    try:
        seen += [losses.of(trial, batch, part) for part in parts]
        count = trial.weight or _count(trial.function, batch, (whole, *parts), seen)
        if count is None:
            numbers = ", ".join(" and ".join(str(len(each)) for each in found) or "none" for found in seen)
            return Verdict(
                fault=f"{begin}the targets of its mean losses ({numbers} in {len(whole.rows)} rows with padding, in "
                "its longest row and in its shortest ones without) are no targets, tokens or rows that weft finds in its "
                "arguments. So say what a microbatch counts: @weft.step(tokens=..., weight=...)"
            )
        trial.weight = count
        one, several = trial.run(batch, [whole]), trial.run(batch, parts)
        if trial.differ(one, several):
            return Verdict(
                fault=f"{begin}its loss for {len(whole.rows)} rows without padding is {shown(several, one)} with it, "
                f"so that padding counts, or rows depend on each other{remedy}"
            )
    except Incomparable as found:
        return Verdict(fault=f"{begin}without padding it fails with {found}{remedy}")
    return Verdict(count=[count.found, count.ignored] if isinstance(count, Count) else [])


def _pieces(function: Callable[..., Any], batch: MiniBatch) -> tuple[Group, list[Group]]:
    """The longest row and the shortest ones: together, with their padding, and apart, without."""
    assert batch.cut.tokens is not None
    tensors = [one for one in _tensors(function, batch.args, batch.kwargs) if one[0] in batch.trimmed]
    spans = spans_of(mask_of(batch.cut.tokens, tensors, batch.args, batch.kwargs))
    length = batch.groups[0].length
    order = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])
    parts = [group(rows, spans, length) for rows in (order[:1], order[1:][-2:]) if rows]
    return Group(tuple(sorted(row for part in parts for row in part.rows)), 0, length, length), parts


def _no_proof(trial: Trial, whole: Group, parts: Sequence[Group]) -> str:
    """Why these rows would not show whether padding counts, or cannot be run; empty if they can."""
    models = trial.models
    if len(parts) < 2 or parts[1].stop - parts[1].start == whole.length:
        return "no row of its first batch is padded, which would show whether padding counts"
    if any(model.estimated for model in models):
        return f"no rank has room for the whole model. {WITHOUT_PROOF}"
    if any(model.partitioned and (trial.session.pipeline is not None or model.sharded) for model in models):
        return f"another step has split the model before. {WITHOUT_PROOF}"
    return ""


def _count(
    function: Callable[..., Any], batch: MiniBatch, pieces: Sequence[Group], seen: Sequence[Sequence[Targets]]
) -> Count | None:
    """The count of what losses are means over. ``seen``: the targets of each loss, for each of the ``pieces``."""
    assert batch.cut.tokens is not None
    ignored = {targets.ignored for losses in seen for targets in losses}
    if len(ignored) != 1 or None in ignored or len(set(map(len, seen))) != 1:
        return None
    empty = Count(function, replace(batch.cut.tokens, trimmed=batch.trimmed), (), ignored.pop() or 0)
    given = [batch.take(piece) for piece in pieces]
    tensors = [_tensors(function, *each) for each in given]
    whole = [
        (path, first)
        for path, tensor in tensors[0]
        if path in batch.trimmed and not (tensor.is_floating_point() or tensor.is_complex())
        for first in (True, False)
        if first or tensor.dim() == 2
    ]

    def same(path: str, first: bool, values: bool, losses: Sequence[Targets]) -> bool:
        for targets, some, (args, kwargs) in zip(losses, tensors, given, strict=True):
            own = empty.values(path, first, some, args, kwargs)
            if not (torch.equal(own, targets.values) if values else len(own) == len(targets.values)):
                return False
        return True

    found = []
    for losses in zip(*seen, strict=True):
        fitting = [one for one in whole if same(*one, True, losses)]
        fitting += [one for one in ((MASK, True), (MASK, False), (ROWS, True)) if same(*one, False, losses)]
        if not fitting:
            return None
        found.append(fitting[0])
    count = replace(empty, found=found)
    try:
        for args, kwargs in given:
            count(*args, **kwargs)
    except UsageError:
        return None
    return count if found else None


@dataclass(frozen=True)
class Targets:
    """Those that a mean loss is over, sorted; ``ignored``: the one that it leaves out, None where some count more."""

    values: Tensor
    ignored: int | None

    def __len__(self) -> int:
        return len(self.values)


class Losses(TorchFunctionMode):
    """Notes, while a step goes forward, the targets that its mean losses are over."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Targets] = []

    def of(self, trial: Trial, batch: MiniBatch, piece: Group) -> list[Targets]:
        """The targets of each loss in a piece of a batch."""
        self._found = []
        with self:
            trial.run(batch, [piece])
        return self._found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            self._look(**bound.arguments)
        return func(*args, **kwargs)

    def _look(self, target: Tensor, weight: Any, reduction: str, ignore_index: int, **rest: Any) -> None:
        if reduction == "mean":
            countable = weight is None and not target.is_floating_point()
            values = target[target != ignore_index].flatten().sort().values
            self._found.append(Targets(values, ignore_index if countable else None))
