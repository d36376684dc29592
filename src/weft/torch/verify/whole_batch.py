"""Microbatches beside the whole batch: is their loss the same, and which rows must stay together so that it is?

A mean over rows is the mean of its microbatches. A loss that joins rows is not: one that pairs the first half of the
batch with the second (DPO, rewards), or each row with all others (contrastive losses, CLIP). The proof of the first
step does not see that, for it compares with one process that runs the same microbatches.

So before a model is split the rank that decides runs the step's forward pass on the whole batch and on microbatches.
Modules are in evaluation mode, since batch norm and dropout differ between the two by right. Compared are

    the losses that backward passes begin at      sum of w_i loss_i = loss of all rows
    their gradients in what the model returns     for each row, since losses may be equal by chance: log 2 of a DPO
                                                  whose policy is still its reference

where w_i is what microbatch i weighs. The model itself goes forward without a graph. For a trainer they are compared
twice more, with what the model returns multiplied by a number for each row. Else what joins rows may not show yet: the
divergence from a reference in KTO is 0 at least, and at most 0 as long as the two are alike.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.session.cut import Joined
from weft.torch.calls.interception import intercepted
from weft.torch.execution.gradients import Gradients, Tensors, root_gradients
from weft.torch.execution.thread_settings import current_scale, rehearsed
from weft.torch.keras_layers import layers_evaluate
from weft.torch.pytorch.private import any_autocast, call_of
from weft.torch.session.collectives import agree_on
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import MiniBatch, Piece, padded, prepare, rows_of
from weft.torch.tensors.pytree import map_tensors
from weft.torch.trace.dry_run import Forward, Snapshot, dry_run, hand_to_step
from weft.torch.verify.findings import LEAST, LIMITS, LOOSEST, SMALL

log = logging.getLogger("weft")

Weight = Callable[..., Any] | None
WHAT = "the whole batch in one piece"
SEED = 7
STRETCHES = ((1.0, 1.0), (0.0, 1.0), (1.0, 3.0))
"""Between which numbers those lie by which a trial multiplies what the model returns for a row."""
BLOCKS = (2, 3)
"""Pairs, and triplets of an anchor, a positive and a negative one."""


@dataclass(frozen=True)
class Verdict:
    """The finding of the first rank, for all ranks.

    ``joined``: the rows that must stay together. ``text``: what to say of it. ``warns``: it is a warning.
    """

    joined: Joined = Joined()
    text: str = ""
    warns: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        content = json.loads(text)
        return cls(Joined(**content.pop("joined")), **content)


@dataclass
class Outcome:
    """Losses and gradients of a batch, as one piece or in microbatches.

    Attributes:
        losses: Those that backward passes began at, in their order, weighted and summed over microbatches.
        sizes: The sums of their absolute values.
        gradients: For each tensor that a call of a model returned the gradient in it, rows in the order of the batch,
            as far as that is known: see `_joined_gradient`.
    """

    losses: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)

    def add(self, losses: Sequence[float]) -> None:
        """Add what one more piece gave."""
        if self.losses and len(losses) != len(self.losses):
            raise Incomparable("its microbatches have different numbers of backward passes")
        self.losses = [a + b for a, b in zip(self.losses or [0.0] * len(losses), losses, strict=True)]
        self.sizes = [a + abs(b) for a, b in zip(self.sizes or [0.0] * len(losses), losses, strict=True)]


def _joined_gradient(parts: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """The gradient in what the whole batch gave, from those in its pieces.

    Where a call has several rows for each of the batch, they stand in blocks (two columns one after the other), or as
    neighbours: both are given.
    """
    if not parts[0].dim():
        return [torch.stack([*parts]).sum()]
    rows = [row for piece in pieces for row in rows_of(piece)]
    parts = padded(parts, pieces)
    if len({part.shape[1:] for part in parts}) > 1:
        return [parts[0]]  # padded to other lengths
    several, rest = divmod(sum(map(len, parts)), len(rows))
    if rest or not several:
        return [torch.cat([*parts])]
    order = torch.tensor(rows).argsort().to(parts[0].device)
    form = parts[0].shape[1:]
    blocks = torch.cat([part.reshape(several, -1, *form) for part in parts], 1)[:, order]
    beside = torch.cat([part.reshape(-1, several, *form) for part in parts])[order]
    return [each.reshape(-1, *form) for each in ((blocks, beside) if several > 1 else (beside,))]


class Incomparable(Exception):
    """Why the two cannot be compared."""


class OnlyForward(Incomparable):
    """There is no backward pass, so there are no gradients that could be wrong."""


class SplitBefore(Incomparable):
    """No rank has all of the model any more."""


@dataclass
class Rows:
    """Finds which rows the loss of a step joins.

    Args:
        title: The name of the step for messages.
        like: The step that shows it, as the one that trains does; it has the `function`, the `weight` and the `cut`.
        trainer: A trainer calls the step, so that the script did not choose the microbatches.
        reorders: The rows of a microbatch need not be neighbours: the trainer puts results in order again.
        judged: That has been done.
    """

    title: str
    like: Any
    trainer: bool = False
    reorders: bool = False
    judged: bool = False

    def judge(self, session: Session, models: Sequence[Any], batch: MiniBatch, everybody: bool) -> Joined:
        """The rows that no cut may part; what was found is logged on the first rank.

        ``everybody``: all ranks call this. Else the first rank looks, and only warns.
        """
        step, open_number = self.like, session.settings.microbatches == "auto"
        adapts = everybody and (self.trainer or open_number)
        step.rows.judged = True

        def judged() -> Verdict:
            if batch.size is None:
                return Verdict()
            own = step.rows is self
            known = inspect.signature(step.function).parameters
            args = batch.args if own else batch.args[: len(known)]
            kwargs = {name: value for name, value in batch.kwargs.items() if own or name in known}
            count = min(batch.size, 2 * session.settings.partitions) if open_number else batch.microbatches
            trial = prepare(step.function, args, kwargs, step.cut, count)
            return judge(
                session, models, step.function, step.rows.title, trial, step.weight, adapts, self.reorders
            )

        if everybody:
            verdict = Verdict.from_text(agree_on(session, lambda: judged().to_text(), WHAT))
        else:
            verdict = judged() if session.rank == 0 else Verdict()
        if verdict.text and session.rank == 0:
            log.log(logging.WARNING if verdict.warns else logging.INFO, "%s", verdict.text)
        return verdict.joined


def judge(
    session: Session, models: Sequence[Any], function: Callable[..., Any], title: str, batch: MiniBatch, weight: Weight,
    adapts: bool, blocks: bool,
) -> Verdict:  # fmt: skip
    """The verdict on a step that is about to be split; on the rank that decides.

    ``title``: what messages call it. ``weight``: what its microbatches weigh. ``adapts``: rows are kept together, if
    that helps, else it is a warning. ``blocks``: also rows that are not neighbours.
    """
    if batch.microbatches < 2:
        return Verdict()
    trial = Trial(session, models, function, weight)
    try:
        if any(model.estimated for model in models):
            raise Incomparable("no rank has room for the whole model")
        if any(model.partitioned and (session.pipeline is not None or model.sharded) for model in models):
            raise SplitBefore("the model has been split before")
        return _adapted(trial, batch, title, blocks) if adapts else _warned(trial, batch, title)
    except Incomparable as reason:
        text = f"{title} was not compared with the whole batch in one piece: {reason}"
        if not adapts or isinstance(reason, OnlyForward):
            log.info("%s", text)
            return Verdict()
        if isinstance(reason, SplitBefore):
            return Verdict(
                Joined(rows=0),
                f'{text}. So a batch is one microbatch: if its loss is a mean over rows, write "verify": "off"',
                warns=True,
            )
        return Verdict(text=f'{text}. If its loss joins rows, write "microbatches": 1', warns=True)


def _warned(trial: Trial, batch: MiniBatch, title: str) -> Verdict:
    """The verdict on a step of the script's own. The first two microbatches are enough, and take less memory."""
    ranges = [batch.ranges(0), batch.ranges(1)]
    parts, whole = trial.run(batch, ranges), trial.run(batch, [[(0, batch.samples(0) + batch.samples(1))]])
    if not trial.differ(whole, parts):
        return Verdict()
    return Verdict(
        text=f"the loss of {title} is not the same for two microbatches as for their rows in one piece: "
        f"{shown(parts, whole)}. So it joins rows (pairs, contrasts with the rest of the batch), or is a mean "
        'over something else than rows, and depends on "microbatches". Count what it is a mean over with '
        '@weft.step(weight=...), or write "microbatches": 1 if rows belong together',
        warns=True,
    )


def _adapted(trial: Trial, batch: MiniBatch, title: str, blocks: bool) -> Verdict:
    """The verdict on a step whose microbatches the script did not choose."""
    assert batch.size is not None
    size, count = batch.size, batch.microbatches
    full_tensors = [trial.run(batch, [[(0, size)]], stretch) for stretch in STRETCHES]

    def fault(ranges: list[list[tuple[int, int]]]) -> str:
        """The difference of these pieces from the whole batch, in words; empty if there is none."""
        try:
            for whole, stretch in zip(full_tensors, STRETCHES, strict=True):
                parts = trial.run(batch, ranges, stretch)
                if trial.differ(whole, parts):
                    return f"its loss is {shown(parts, whole)}"
        except Incomparable as reason:
            return f"it fails with {reason}"
        return ""

    def cut(joined: Joined, number: int) -> str:
        return fault([joined.ranges(size, number, index) for index in range(number)])

    found = cut(Joined(), count)
    if not found:  # other batches are cut elsewhere, perhaps behind the first row
        least = size // count
        return Verdict(
            Joined(next((n for n in range(1, least) if not fault([[(0, n)], [(n, size)]])), least))
        )
    begin = f"{title} joins rows of the batch: in {count} microbatches of neighbouring rows {found}"
    for joined, how in _candidates(size, blocks):
        number = min(joined.units(size), count)
        if number > 1 and not cut(joined, number):
            return Verdict(joined, f"{begin}. {how} stay in one microbatch from now on, {number} in all")
    return Verdict(
        Joined(rows=0),
        f"{begin}, and no cut gives the same. So a batch is one microbatch from now on, and ranks wait for each other: "
        'choose larger batches, or accept the other loss with "verify": "off"',
        warns=True,
    )


def _candidates(size: int, blocks: bool) -> Iterator[tuple[Joined, str]]:
    for number in BLOCKS if blocks else ():
        if size % number == 0:
            yield Joined(blocks=number), f"Row i of each of the {number} equal blocks of rows"
    for rows in range(2, size // 2 + 1):
        if size % rows == 0:
            yield Joined(rows=rows), f"Each {rows} neighbouring rows"


def shown(parts: Outcome, whole: Outcome) -> str:
    one, other = sum(parts.losses), sum(whole.losses)
    if not math.isclose(one, other, rel_tol=1e-4):
        return f"{one:.6g} instead of {other:.6g}"
    return f"{one:.6g} as in one piece, but its gradients are others"


class Trial(Forward):
    """Runs the forward pass of a step, and leaves nothing behind. It takes the step's backward passes."""

    def __init__(
        self, session: Session, models: Sequence[Any], function: Callable[..., Any], weight: Weight
    ) -> None:
        self.session, self.models, self.function, self.weight = session, models, function, weight
        self.averages = all(model.averages for model in models)
        self.dtypes = {
            p.dtype for model in models for p in model.module.parameters() if p.is_floating_point()
        }
        self._scale = self._part = 1.0
        self._losses: list[float] = []
        self._leaves: list[Tensor] = []
        self._factors = torch.ones(0)
        self._rows: list[int] = []

    def run(
        self,
        batch: MiniBatch,
        ranges: Sequence[Piece],
        stretch: tuple[float, float] = STRETCHES[0],
    ) -> Outcome:
        """The outcome of pieces of a batch, of which these are the rows.

        Raises:
            Incomparable: The step draws random numbers, has no backward pass, or cannot be run in this way.
        """
        modules: list[nn.Module] = [model.module for model in self.models]
        (least, most), numbers = stretch, torch.Generator("cpu").manual_seed(SEED)
        self._factors = torch.empty(batch.size or 0, device="cpu").uniform_(least, most, generator=numbers)
        try:
            with (
                dry_run(self.session, self.models, self.function, (batch.args, batch.kwargs)) as dry,
                self.restored(dry.snapshot(self.weight)),
                intercepted([(module, self._called(module)) for module in modules]),
                torch.enable_grad(),
                layers_evaluate(),
                rehearsed(self),
            ):
                for module in modules:
                    for part in module.modules():
                        part.training &= part is module  # the module itself: losses may ask it
                args, kwargs = dry.given
                return self._collect(replace(batch, args=args, kwargs=kwargs), ranges)
        except Incomparable:
            raise
        except Exception as error:
            raise Incomparable(f"{type(error).__name__}: {error}") from error

    def _collect(self, batch: MiniBatch, ranges: Sequence[Piece]) -> Outcome:
        """The outcome of the step for these pieces of a batch, one after the other."""
        pieces = [batch.take(each) for each in ranges]
        shares = self._shares(pieces, ranges)
        outcome, streams = Outcome(), self.session.streams
        parts: list[list[Tensor]] = []
        for (args, kwargs), share, piece in zip(pieces, shares, ranges, strict=True):
            self._losses, self._leaves, self._scale = [], [], share if self.averages else 1.0
            self._rows = rows_of(piece)
            given, named = map_tensors((args, kwargs), hand_to_step)
            streams.seed(SEED)
            with current_scale(share * self._part):
                self.function(*given, **named)
            if streams.has_drawn_since(SEED):
                raise Incomparable("it draws random numbers")
            if not self._losses:
                raise OnlyForward("it has no backward pass")
            outcome.add(self._losses)
            parts.append(
                [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
            )
        outcome.gradients = [_joined_gradient(each, ranges) for each in zip(*parts, strict=True)]
        return outcome

    def _shares(self, pieces: Sequence[Any], ranges: Sequence[Piece]) -> list[float]:
        """The share that each piece has of the whole."""
        counts = [float(len(rows_of(each))) for each in ranges]
        if self.weight is not None:
            counts = [float(self.weight(*args, **kwargs)) for args, kwargs in pieces]
        return [count / sum(counts) if sum(counts) else 1 / len(counts) for count in counts]

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """Note what a backward pass begins at, and go back as far as to what the models returned."""
        roots, given = root_gradients(tensors, grads, self._scale)
        self.note_losses(roots, given)
        leaves = [leaf for leaf in self._leaves if self._scale]
        if leaves and any(root.requires_grad for root in roots):
            found = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def note_losses(self, roots: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Note what a backward pass begins at."""
        pairs = zip(roots, given, strict=True)
        self._losses.append(sum(float((root.detach() * grad).sum()) for root, grad in pairs if self._scale))

    def note_autocast(self) -> None:
        """Note what a model computes in."""
        if any_autocast():
            self.dtypes |= {
                torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
            }

    def restored(self, snapshot: Snapshot) -> AbstractContextManager[Any]:
        """Inside, the step runs; afterwards all is as it was."""
        return snapshot.restored(None)

    def limit(self) -> float:
        """The relative difference of losses that rounding may explain."""
        return max(LIMITS.get(dtype, LOOSEST) for dtype in self.dtypes or {torch.float32})

    def differ(self, whole: Outcome, parts: Outcome) -> bool:
        """True if rounding does not explain the difference.

        Raises:
            Incomparable: The two have different numbers of losses, or numbers that are not finite.
        """
        limit = self.limit()
        if len(whole.losses) != len(parts.losses):
            raise Incomparable("it has other numbers of backward passes")
        if not all(map(math.isfinite, (*whole.losses, *parts.losses))):
            raise Incomparable("a loss is not finite")
        for one, other, size in zip(whole.losses, parts.losses, parts.sizes, strict=True):
            if abs(one - other) > limit * max(abs(one), size, LEAST):
                return True
        largest = max((float(each.norm()) for each, *_ in whole.gradients), default=0.0)
        return any(
            all(
                float((one - other).norm()) > 10 * limit * max(float(one.norm()), SMALL * largest, LEAST)
                for other in ways
            )
            for (one, *_), ways in zip(whole.gradients, parts.gradients, strict=True)
            if one.shape == ways[0].shape
        )

    def _stretched(self, tensor: Tensor) -> Tensor:
        """A tensor with rows of the batch, each multiplied by its number."""
        if not tensor.dim() or len(tensor) != len(self._rows):
            return tensor
        factors = self._factors[self._rows].to(tensor.device, tensor.dtype)
        return tensor * factors.view(-1, *[1] * (tensor.dim() - 1))

    def _called(self, module: nn.Module) -> Callable[..., Any]:
        """A call of a model without a graph: what it returns are leaves."""
        inner = call_of(module)

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            self.dtypes.add(tensor.dtype)
            made = self._stretched(tensor.detach()).requires_grad_()
            self._leaves.append(made)
            return made.clone()  # the step may write into it

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note_autocast()
            with torch.no_grad():
                result = inner(*args, **kwargs)
            return map_tensors(result, leaf)

        return call
