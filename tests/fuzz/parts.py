"""The smallest modules of drawn programs: each has one habit, takes [rows, WIDTH] and gives that."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Twice(torch.autograd.Function):
    """An operation of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2 + 0 * ctx.saved_tensors[0]


class Dense(nn.Module):
    """The usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Frozen(Dense):
    """Its weight is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


class Plain(nn.Linear):
    """What it returns is not saved for its backward pass, so the caller may write into it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Sequence(nn.Sequential):
    """May be opened."""

    def __init__(self) -> None:
        super().__init__(Dense(), nn.Identity(), Dense())


class Same(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Viewed(nn.Module):
    """Returns a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH)


class Norm(nn.Module):
    """Writes running statistics. Not right after a linear module, whose bias would have a gradient of mere rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return self.norm(x) if len(x) > 1 else x


class Counted(Dense):
    """Reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.level.mul_(0.9).add_(x.detach().mean())
        return super().forward(x) - self.level


class Dropped(Dense):
    """Draws a mask and lets it go again, so that what it gives does not depend on it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        mask = F.dropout(torch.ones_like(x), 0.3)
        return x * (1 + mask) - x * mask


class Aux(Dense):
    """Leaves a loss in an attribute, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.aux = h.square().mean()
        return x + h


class Reads(Dense):
    """Uses what its parent has put into an attribute."""

    seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if self.seen is None else h + self.seen * 0.5


class Running(Dense):
    """An attribute that goes from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().forward(x) - self.mean


class Tally(Dense):
    """Counts its calls and uses the number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Rows(Dense):
    """Shapes inside of it depend on data."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach()[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, chosen, super().forward(x[chosen]))


class Branch(Dense):
    """What it does depends on data; it may end early."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().mean().item() > 0:
            return x * 0.5
        return super().forward(x)


class Pair(Dense):
    """Returns a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = super().forward(x)
        return h, h.abs().mean()


class Mapped(Dense):
    """Returns a dict with tensors and a number; takes options by name."""

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        h = super().forward(x) * scale
        return {"out": h if mask is None else h * mask, "parts": [h.mean(), 0.5]}


class Collects(Dense):
    """Fills a list that it is given."""

    def forward(self, x: Tensor, notes: list[Tensor]) -> Tensor:  # type: ignore[override]
        notes.append(super().forward(x))
        return x * 0.5


class Writes(Dense):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.9)
        return super().forward(x)


class Checkpointed(nn.Module):
    """Computes its inside twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Dropped()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


class Attention(nn.Module):
    """Rows look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.inside(x[None], x[None], x[None])
        return found[0] + weights.mean()


class Packed(nn.Module):
    """A sequence of lengths that are read from data."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.detach()[:, 0] > 0).long() + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.stack([x, x * 0.5], 1), lengths, batch_first=True, enforce_sorted=False
        )
        return self.inside(packed)[1][0]


class Embedded(nn.Module):
    """Looks up rows by whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x.detach()[:, 0].abs().long().clamp(max=2))


class Stores(Dense):
    """Keeps what it computes in a dict that it is given, and uses what others have kept there."""

    def forward(self, x: Tensor, store: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        h = super().forward(x)
        store["sum"] = store["sum"] + h if "sum" in store else h
        return x * 0.5 + store["sum"]


class Nothing(Dense):
    """Returns None beside a tensor, and one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, None, list[Tensor]]:  # type: ignore[override]
        h = super().forward(x)
        return h, None, [h, x]
