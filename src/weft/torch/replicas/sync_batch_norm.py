"""BatchNorm over all replicas, with exact gradients, that also works inside a pipeline's stages.

BatchNorm of one replica normalises by the samples that this replica sees in one microbatch. ``SyncBatchNorm`` takes
the same microbatch of all replicas together, as one process would with the whole:

    forward     each replica: n, mean, M2 = sum (x - mean)^2    exchanged, then combined (Chan et al. 1979)
    backward    each replica: sum dy, sum dy * x^               exchanged, then added
                dx = w / sigma * (dy - (sum dy) / N - x^ * (sum dy * x^) / N)

Replicas run their microbatches in an order of their own. So inside a step a message is addressed by module, step,
microbatch and call, and a microbatch that waits for a message lets others have their turn. PyTorch's own
``SyncBatchNorm`` calls collectives in the order of execution, which needs the same order everywhere, and a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from weft.errors import UsageError, warn
from weft.session.recording import record_facts
from weft.torch.pytorch.private import tables_of
from weft.torch.session import current
from weft.torch.session.collectives import Exchange
from weft.torch.session.session import Session
from weft.torch.tensors.marks import FEW_SAMPLES, MARK
from weft.torch.tensors.mini_batch import MiniBatch

_COUNT = "num_batches_tracked"
LEAST_SAMPLES = 16
"""With fewer samples the statistics of one replica are too noisy (arXiv 1706.02677, section 2.3, uses 32)."""


BatchNorm: Any = nn.BatchNorm2d.__base__
"""The class of every kind of BatchNorm; PyTorch has no public name for it."""


_present = threading.local()
"""``again`` is set while an activation checkpoint runs a forward pass of this thread again."""


@contextmanager
def without_counting(modules: Sequence[Any]) -> Iterator[None]:
    """Inside, these BatchNorms leave their running statistics alone: they have counted this batch already.

    Where one is a ``SyncBatchNorm``, plain ones go on counting: a ``SyncBatchNorm`` gives the turn to other
    microbatches, whose batches the plain ones have to count.
    """
    held = [m for m in modules if m.track_running_stats and not isinstance(m, SyncBatchNorm)]
    if any(isinstance(module, SyncBatchNorm) for module in modules):
        held = []
    before = [(module, module.momentum, tables_of(module)[1].get(_COUNT)) for module in held]
    _present.again = True
    for module in (
        held
    ):  # autograd must keep the same tensors as the first time, so they get the statistics all the same
        module.momentum = 0.0
        tables_of(module)[1][_COUNT] = None
    try:
        yield
    finally:
        _present.again = False
        for module, momentum, count in before:
            module.momentum = momentum
            tables_of(module)[1][_COUNT] = count


def without_counting_again() -> AbstractContextManager[None]:
    """Around a forward pass that an activation checkpoint runs again: no model's BatchNorm counts the batch twice."""
    models = current.session().models if current.is_initialized() else []
    outlines = [model.outline for model in models if model.outline]
    return without_counting([module for outline in outlines for module in outline.normalisers])


class SyncBatchNorm(BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` or ``3d`` whose statistics in training are those of all replicas together.

    Takes [N, C] or [N, C, ...] of any such shape; the number of samples may differ between replicas. In evaluation it
    is plain BatchNorm. Made by :func:`convert_sync_batchnorm`.
    """

    number = 0
    """The number of this module among the job's, the same on every rank."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm takes [N, C, ...], it got a tensor of shape {list(input.shape)}")

    def exchange(self) -> Any:
        """The exchange of statistics between replicas for this call; None if this replica's statistics count alone."""
        if not current.is_initialized():
            return None
        session = current.session()
        return None if session.mesh.rdp == 1 or session.tracing else Exchange(session, self.number)

    def forward(self, input: Tensor) -> Tensor:
        exchange = self.exchange() if self.training else None
        if exchange is None:
            return super().forward(input)
        self._check_input_dim(input)
        factor: Any = self.momentum
        again = getattr(_present, "again", False)
        if self.num_batches_tracked is not None and not again:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked
        result, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, exchange)
        if self.running_mean is not None and self.running_var is not None and not again:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(
                    mean.to(self.running_mean.dtype), _as_weight(factor, self.running_mean)
                )
                self.running_var.lerp_(
                    unbiased.to(self.running_var.dtype), _as_weight(factor, self.running_var)
                )
        return result


def _as_weight(factor: Any, like: Tensor) -> Any:
    return factor.to(like.dtype) if isinstance(factor, Tensor) else factor


class _Normalise(torch.autograd.Function):
    """(x [N, C, ...], weight [C], bias [C]) -> y, and mean [C], variance [C] and number of values of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, exchange: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        values = x.to(kind)
        count = x.numel() // x.shape[1]
        mean = values.sum(dims) / max(1, count)
        m2 = (values - mean.view(shape)).square().sum(dims)
        number = torch.full((1,), float(count), dtype=kind, device=x.device)
        means, m2s, counts = exchange(torch.cat([mean, m2, number]), 0).split([len(mean), len(mean), 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (m2s.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        scale = (variance + eps).rsqrt()
        normal = (values - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.exchange, ctx.dims, ctx.shape = exchange, dims, shape
        ctx.mark_non_differentiable(mean, variance, total)
        result = normal
        if weight is not None:
            result = result * weight.to(kind).view(shape)
        if bias is not None:
            result = result + bias.to(kind).view(shape)
        result = result.to(x.dtype)
        return (result.clone() if result is normal else result), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, total = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        whole, along = ctx.exchange(sums, 1).sum(0) / total
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        inner = grad - whole.view(ctx.shape) - normal * along.view(ctx.shape)
        shift, slope = sums
        return (
            (inner * factor.view(ctx.shape)).to(grads[0].dtype),
            None if weight is None else slope.to(weight.dtype),
            None if weight is None else shift.to(weight.dtype),
            None,
            None,
        )


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm in ``module`` by :class:`SyncBatchNorm` with the same parameters and buffers.

    Every rank calls it, after ``init`` and before ``DistributedModel``. Returns ``module``, or its replacement if it is
    a BatchNorm itself. With one replica nothing changes.
    """
    session = current.session()
    if any(isinstance(part, BatchNorm) and isinstance(part, LazyModuleMixin) for part in module.modules()):
        raise UsageError("the model has a LazyBatchNorm without parameters: run it once before converting it")
    if session.mesh.rdp == 1:
        return module
    session.connect_replicas()
    made: dict[int, nn.Module] = {}

    def converted(old: nn.Module) -> nn.Module:
        if id(old) not in made:
            plain = isinstance(old, BatchNorm) and not isinstance(old, SyncBatchNorm)
            made[id(old)] = _like(old, session) if plain else old
            for name, child in old.named_children():
                setattr(old, name, converted(child))
        return made[id(old)]

    return converted(module)


def _like(old: Any, session: Session) -> SyncBatchNorm:
    new = SyncBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
        setattr(new, name, getattr(old, name))
    if hasattr(old, MARK):
        setattr(new, MARK, getattr(old, MARK))
    new.number = session.number_normaliser()
    return new


def warn_of_few_samples(session: Session, model: Any, batch: MiniBatch) -> None:
    """Warn, once for each model with replicas, of BatchNorm that sees few samples at a time because batches are cut.

    The least that a BatchNorm sees goes into a recording, with replicas or without.
    """
    if not batch.size or not model.training or model.__dict__.get(FEW_SAMPLES):
        return
    model.__dict__[FEW_SAMPLES] = True
    samples = batch.size // batch.microbatches
    every = [seen for each in session.models for _, seen in _seen(session, each.module, samples)]
    if every:
        record_facts(session, batch_norm_samples=min(every))
    few = [(name, seen) for name, seen in _seen(session, model.module, samples) if seen < LEAST_SAMPLES]
    if few and session.rank == 0 and session.mesh.rdp > 1:
        more = f" and {len(few) - 1} more" if few[1:] else ""
        advice = "" if few[0][1] > samples else "weft.convert_sync_batchnorm(model) before DistributedModel, "
        warn(
            f"BatchNorm ({few[0][0]}{more}) sees {few[0][1]} samples at a time, fewer than {LEAST_SAMPLES}: its "
            f"statistics are noisy. Use {advice}fewer microbatches or larger batches",
        )


def _seen(session: Session, root: nn.Module, samples: int) -> Iterator[tuple[str, int]]:
    """Every BatchNorm that trains, and how many samples it sees of a microbatch with so many."""
    for name, part in root.named_modules():
        if isinstance(part, BatchNorm) and part.training:
            yield name, samples * (session.mesh.rdp if isinstance(part, SyncBatchNorm) else 1)
