"""The first step of a job that cuts batches by tokens, beside a padded batch: does padding not count, and what does?

Without its padding a row gives the same only if the model and the loss look at no padding. And the weight of a
microbatch is what its loss is a mean over: all targets, those without the first of each row (a language model predicts
the next one), all tokens, or rows. Both are found before the model is split, on the rank that decides, from a few rows:

    whole    the longest row and the shortest ones, with all of their padding
    parts    the longest row; the shortest ones; each without padding

Targets of the mean losses are noted in each while the step goes forward, and sought among the step's arguments: their
number is the weight. Then losses of the parts, and gradients of all parameters, are compared with those of the whole.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError
from weft.session.cut import Group, Tokens, argument_names
from weft.session.lengths import group
from weft.torch.replicas.sync_batch_norm import BatchNorm
from weft.torch.session.collectives import agree_on
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import LOSSES, MiniBatch, is_whole, named_tensors
from weft.torch.tensors.tokens import mask_of, spans_of
from weft.torch.verify.gradient_trial import GradientTrial, Passed
from weft.torch.verify.whole_batch import Incomparable

log = logging.getLogger("weft")

LEAVE_OUT = "leave tokens= (of a trainer: trainer_tokens) out"
WITHOUT_PROOF = 'To cut by tokens without that comparison, give weight=, too, and write "verify": "off"'


@dataclass(frozen=True)
class Counted:
    """Targets of a loss among the arguments of a step.

    Attributes:
        path: The tensor that has them.
        ignored: The number in it that is no target.
        first: The first number of a row is a target, too.
        masked: Numbers in the padding are none.
    """

    path: str
    ignored: int
    first: bool = True
    masked: bool = False

    def of(self, tensors: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """The targets, sorted."""
        found = tensors[self.path]
        kept = (found != self.ignored) & (mask != 0) if self.masked else found != self.ignored
        return (found[kept] if self.first else found[:, 1:][kept[:, 1:]]).sort().values


@dataclass(frozen=True)
class Count:
    """A function that counts what the losses of a step are means over, in the step's arguments.

    ``function``: the step; ``tokens``: where its mask is; ``found``: the targets of each of its losses.
    """

    function: Callable[..., Any]
    tokens: Tokens
    found: Sequence[Counted]

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        tensors = [
            one for one in _tensors(self.function, args, kwargs) if one[0] in (self.tokens.trimmed or ())
        ]
        mask = mask_of(self.tokens, tensors, args, kwargs)
        numbers = [len(one.of(dict(tensors), mask)) for one in self.found]
        if len(set(numbers)) > 1:
            listed = ", ".join(f"{n} in {one.path}" for n, one in zip(numbers, self.found, strict=True))
            raise UsageError(
                f"the losses of the step are means over different numbers of targets ({listed}), which they were not "
                "in its first batch: say what a microbatch counts with @weft.step(tokens=..., weight=...)"
            )
        return numbers[0]


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

    ``fault``: why the step may not be cut by tokens. ``warning``: why it is cut by rows instead. ``count``: the
    targets of its losses, as `Counted` has them, if the step does not say itself what a microbatch weighs.
    ``trimmed``, ``sides``: what was cut off of the rows that were compared, see `Tokens`.
    """

    fault: str = ""
    warning: str = ""
    count: list[dict[str, Any]] = field(default_factory=list)
    trimmed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sides: Sequence[bool] = (True, True)


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
                f"another value, or {LEAVE_OUT}"
            )
    if session.first_inputs:
        raise UsageError(
            f"{title} is cut by tokens, for which each rank of a pipeline needs the mask, but only the first rank's "
            f'inputs count: give all the same batch ("inputs": "equal"), or {LEAVE_OUT}'
        )
    normalised = [
        name for model in models for name, part in model.module.named_modules() if isinstance(part, BatchNorm)
    ]
    if normalised:
        raise UsageError(
            f"{title} is cut by tokens, but {normalised[0]} is a BatchNorm, whose statistics have padding in them: "
            f"{LEAVE_OUT}, or take a LayerNorm"
        )
    if settings.verify == "off":
        if weight is None:
            raise UsageError(
                'the weight of a microbatch is found by a comparison that "verify": "off" leaves out: say what the '
                "loss is a mean over with @weft.step(tokens=..., weight=...)"
            )
        return replace(tokens, trimmed=batch.trimmed), weight
    trial = GradientTrial(session, models, function, weight)
    text = agree_on(session, lambda: json.dumps(asdict(_judged(trial, batch, title))), "the cut by tokens")
    verdict = Verdict(**json.loads(text))
    if verdict.fault:
        raise UsageError(verdict.fault)
    if verdict.warning:
        if session.rank == 0:
            more = ". Microbatches weigh by their rows: if the loss is a mean over tokens, let weight= count them"
            log.warning("%s%s", verdict.warning, more if weight is None else "")
        return None, weight
    front, back = verdict.sides
    proved = replace(tokens, trimmed=verdict.trimmed, sides=(front, back))
    return proved, weight or Count(function, proved, [Counted(**one) for one in verdict.count])


def _judged(trial: GradientTrial, batch: MiniBatch, title: str) -> Verdict:
    """The verdict on a step; on the rank that decides."""
    whole, parts = _pieces(trial.function, batch)
    reason = _no_proof(trial, whole, parts)
    losses = Losses()
    try:
        runs = [] if reason else [losses.of(trial, batch, whole)]
    except Incomparable as found:
        reason = f"its first batch cannot be compared with its rows: {found}"
    if reason:
        return Verdict(warning=f"{title} is cut by rows, not by tokens, because {reason}")
    begin = f"{title} cannot be cut by tokens: "
    remedy = f". Give the model the mask and the loss targets that leave padding out, or {LEAVE_OUT}"
    try:
        given = _weights(trial.weight, batch, parts) if trial.weight else [1.0] * len(parts)
        runs += [losses.of(trial, batch, piece, part) for piece, part in zip(parts, given, strict=True)]
        seen = [targets for targets, _ in runs]
        count = trial.weight or _count(trial.function, batch, (whole, *parts), seen)
        if count is None:
            shown = ", ".join(" and ".join(str(len(each)) for each in found) or "none" for found in seen)
            return Verdict(
                fault=f"{begin}the targets of its mean losses ({shown} in {len(whole.rows)} rows with padding, in "
                "its longest row and in its shortest ones without) are no targets or tokens that weft finds in its "
                "arguments. So say what a microbatch counts: @weft.step(tokens=..., weight=...)"
            )
        weights = _weights(count, batch, parts)
        fault = trial.differences(runs[0][1], [passed for _, passed in runs[1:]], weights)
    except Incomparable as found:
        dims = ", ".join(
            f"{path} along {', '.join(map(str, dims))}" for path, dims in batch.trimmed.items() if dims
        )
        return Verdict(fault=f"{begin}without padding, cut off {dims}, it fails with {found}{remedy}")
    if fault:
        return Verdict(
            fault=f"{begin}for {len(whole.rows)} rows without padding {fault}, so that padding counts, or rows depend "
            f"on each other{remedy}"
        )
    counted = [asdict(one) for one in count.found] if isinstance(count, Count) else []
    sides = any(part.start > 0 for part in parts), any(part.stop < part.length for part in parts)
    return Verdict(count=counted, trimmed=batch.trimmed, sides=sides)


def _weights(count: Callable[..., Any], batch: MiniBatch, pieces: Sequence[Group]) -> list[float]:
    """Their shares of what is counted in all of them."""
    numbers = [float(count(*args, **kwargs)) for args, kwargs in map(batch.take, pieces)]
    return [number / (sum(numbers) or 1.0) for number in numbers]


def _pieces(function: Callable[..., Any], batch: MiniBatch) -> tuple[Group, list[Group]]:
    """The longest row and the shortest ones: together, with their padding, and apart, without."""
    assert batch.cut.tokens is not None
    tensors = [one for one in _tensors(function, batch.args, batch.kwargs) if one[0] in batch.trimmed]
    spans = spans_of(mask_of(batch.cut.tokens, tensors, batch.args, batch.kwargs))
    length = batch.groups[0].length
    order = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])
    parts = [group(rows, spans, length) for rows in (order[:1], order[1:][-2:]) if rows]
    return Group(tuple(sorted(row for part in parts for row in part.rows)), 0, length, length), parts


def _no_proof(trial: GradientTrial, whole: Group, parts: Sequence[Group]) -> str:
    """Why these rows would not show whether padding counts, or cannot be run; empty if they can."""
    models = trial.models
    if len(parts) < 2 or parts[1].stop - parts[1].start == whole.length:
        return "no row of its first batch is padded, which would show whether padding counts"
    if any(model.estimated for model in models):
        return f"no rank has room for the whole model. {WITHOUT_PROOF}"
    if any(model.sharded for model in models):
        return f"replicas share the model's parameters. {WITHOUT_PROOF}"
    if any(model.partitioned and trial.session.pipeline is not None for model in models):
        return f"another step has split the model before. {WITHOUT_PROOF}"
    return ""


def _count(
    function: Callable[..., Any], batch: MiniBatch, pieces: Sequence[Group], seen: Sequence[Sequence[Targets]]
) -> Count | None:
    """The count of what losses are means over. ``seen``: the targets of each loss, for each of the ``pieces``."""
    assert batch.cut.tokens is not None
    given = [batch.take(piece) for piece in pieces]
    tensors = [[one for one in _tensors(function, *each) if one[0] in batch.trimmed] for each in given]
    masks = [mask_of(batch.cut.tokens, some, *each) for some, each in zip(tensors, given, strict=True)]

    def same(one: Counted, losses: Sequence[Targets]) -> bool:
        return all(
            targets.ignored == one.ignored and torch.equal(one.of(dict(some), mask), targets.values)
            for targets, some, mask in zip(losses, tensors, masks, strict=True)
        )

    if not seen[0] or len(set(map(len, seen))) > 1:
        return None
    found = []
    for losses in zip(*seen, strict=True):
        candidates = _candidates(tensors[0], masks[0], losses[0].ignored)
        fitting = next((one for one in candidates if same(one, losses)), None)
        if fitting is None:
            return None
        found.append(fitting)
    if any(
        len({len(one.of(dict(some), mask)) for one in found}) > 1
        for some, mask in zip(tensors, masks, strict=True)
    ):
        return None
    return Count(function, replace(batch.cut.tokens, trimmed=batch.trimmed), found)


def _candidates(
    tensors: Sequence[tuple[str, Tensor]], mask: Tensor, ignored: int | None
) -> Iterator[Counted]:
    """The targets that a loss may be a mean over, if it leaves ``ignored`` out."""
    whole = [(path, one) for path, one in tensors if not one.is_floating_point() and not one.is_complex()]
    if ignored is None:
        return
    for masked in (False, True):
        for path, tensor in whole:
            for first in (True, False):
                if tensor.shape == mask.shape or (first and not masked):
                    yield Counted(path, ignored, first, masked)


@dataclass(frozen=True)
class Targets:
    """Those that a mean loss is over, sorted; ``ignored``: the one that it leaves out, None if some count more."""

    values: Tensor
    ignored: int | None

    def __len__(self) -> int:
        return len(self.values)


class Losses(TorchFunctionMode):
    """Notes, while a step goes forward, the targets that its mean losses are over."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Targets] = []

    def of(
        self, trial: GradientTrial, batch: MiniBatch, piece: Group, part: float = 1.0
    ) -> tuple[list[Targets], Passed]:
        """The targets of each loss in a piece of a batch; and its losses and gradients, as `trial` has them."""
        self._found = []
        with self:
            passed = trial.passed(batch, piece, part)
        return self._found, passed

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
