"""Logits that are not computed before the loss: losses and gradients beside those of a plain linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.tensors import deferred_logits
from weft.torch.tensors.deferred_linear import deferred_linear
from weft.torch.tensors.deferred_logits import Logits, Source, Use, settled

WORDS, WIDTH = 100, 16
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 4 * WORDS * 8)
    monkeypatch.setattr(deferred_logits, "LEAST_ROWS", 8)


def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, WORDS), labels[..., 1:].reshape(-1), **options
    )


def written(logits: Tensor, labels: Tensor) -> Tensor:
    copy = logits[..., :-1, :].contiguous()
    copy.fill_(0.1)
    return shifted(logits, labels) + copy.sum()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    before = logits * 1.0
    logits[..., 50:].fill_(-30.0)
    return shifted(logits, labels.clamp(max=49)) + before.mean()


IN_CHUNKS: dict[str, Loss] = {
    "all tokens": lambda x, y: F.cross_entropy(x.view(-1, WORDS), y.view(-1)),
    "shifted": shifted,
    "in single precision": lambda x, y: shifted(x.float(), y).to(x.dtype),
    "sum": lambda x, y: shifted(x, y, reduction="sum") / 7,
    "of each token": lambda x, y: (shifted(x, y, reduction="none") * torch.linspace(0, 1, 36).to(x)).sum(),
    "label smoothing": lambda x, y: shifted(x, y, label_smoothing=0.1),
    "weights of words": lambda x, y: shifted(x, y, weight=torch.linspace(0.1, 1, WORDS).to(x)),
    "soft cap": lambda x, y: shifted(torch.tanh(x / 5.0) * 5.0, y),
    "scale": lambda x, y: shifted(x * 0.3, y),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x.view(-1, WORDS), -1), y.view(-1)),
    "every second token": lambda x, y: F.cross_entropy(x[:, ::2].reshape(-1, WORDS), y[:, ::2].reshape(-1)),
    "one token": lambda x, y: F.cross_entropy(x[:, 5], y[:, 5]),
    "all words": lambda x, y: shifted(x[..., :WORDS], y),
}
OTHERWISE: dict[str, Loss] = {
    "two losses": lambda x, y: shifted(x, y) + F.cross_entropy(x.view(-1, WORDS), y.view(-1)),
    "each sample": lambda x, y: sum((F.cross_entropy(x[at], y[at]) for at in range(3)), x.new_zeros(())),
    "two scales": lambda x, y: shifted(x * 2.0, y) + shifted(x, y),
    "without a graph": lambda x, y: shifted(x, y) + shifted(x.detach(), y),
    "words before positions": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "a second term": lambda x, y: shifted(x, y) + 1e-2 * torch.logsumexp(x, -1).pow(2).mean(),
    "a copy is written": written,
    "the logits are written": masked,
    "a view of a product is written": lambda x, y: shifted(x.div_(2.0), y) + x.sum() * 1e-3,
    "probabilities": lambda x, y: F.log_softmax(x, -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).mean(),
    "no loss": lambda x, y: x.square().mean(),
    "accuracy": lambda x, y: shifted(x, y) * (1 + 0 * (x.argmax(-1) == y).float().mean()).to(x.dtype),
    "settled": lambda x, y: shifted(settled(x), y),
}


def gradients(loss_of: Loss, layer: Callable[..., Tensor], dtype: torch.dtype, bias: bool) -> list[Tensor]:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, WORDS, bias=bias).to(dtype)
    x = torch.randn(3, 13, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, WORDS, (3, 13))
    labels[0, 3] = -100
    loss = loss_of(layer(x * 1.5, head.weight, head.bias), labels)
    loss.backward()
    grads = [x.grad, *(parameter.grad for parameter in head.parameters())]
    return [loss.detach(), *(grad for grad in grads if grad is not None)]


def compare(loss_of: Loss, dtype: torch.dtype, bias: bool) -> bool:
    """Asserts that gradients are alike; whether nothing but a loss of rows has used the logits."""
    use = Use()
    tolerance = {torch.float64: 3e-7, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    plain = gradients(loss_of, F.linear, dtype, bias)
    found = gradients(loss_of, lambda *given: deferred_linear(*given, use), dtype, bias)
    for one, other in zip(plain, found, strict=True):
        assert one.dtype == other.dtype and type(other) is Tensor
        assert (one - other).norm() <= tolerance * one.norm()
    return use.defers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_losses_of_rows_never_have_all_logits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logits, "dense", lambda self: pytest.fail("all logits were computed"))
    assert compare(IN_CHUNKS[name], dtype, bias=dtype is not torch.float32)


@pytest.mark.parametrize("name", OTHERWISE)
def test_anything_else_finds_the_logits(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        compare(OTHERWISE[name], dtype, bias=True)


@pytest.mark.parametrize(
    ("name", "times"), [("shifted", 1), ("soft cap", 1), ("of each token", 2), ("label smoothing", 3)]
)
def test_each_chunk_is_computed_once_where_the_loss_is_a_number(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits = Source.logits
    monkeypatch.setattr(Source, "logits", lambda self, x: rows.append(len(x)) or logits(self, x))
    gradients(IN_CHUNKS[name], lambda *given: deferred_linear(*given, Use()), torch.float32, True)
    assert rows == [8, 8, 8, 8, 4] * times


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_microbatch_of_padding_gives_no_gradient(reduction: str) -> None:
    """Its mean is no number, but plain PyTorch's gradients are zeros: they must not spoil the weights."""
    found = []
    for layer in (F.linear, lambda *given: deferred_linear(*given, Use())):
        x = torch.ones(3, WIDTH, requires_grad=True)
        weight = torch.ones(WORDS, WIDTH, requires_grad=True)
        loss = F.cross_entropy(layer(x, weight, None), torch.full((3,), -100), reduction=reduction)
        loss.sum().backward()
        found.append((loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_gradients_wait_for_one_loss_at_a_time() -> None:
    use, weight = Use(), torch.randn(WORDS, WIDTH, requires_grad=True)
    x, labels = torch.randn(3, WIDTH, requires_grad=True), torch.tensor([1, 2, 3])
    losses = [F.cross_entropy(deferred_linear(x, weight, None, use), labels) for _ in range(3)]
    assert use.holds
    for number, loss in enumerate(losses):
        (number * loss).backward()
    expected = torch.autograd.grad(3 * F.cross_entropy(F.linear(x, weight), labels), (x, weight))
    assert not use.holds and use.defers
    torch.testing.assert_close((x.grad, weight.grad), expected)
    F.cross_entropy(deferred_linear(x, weight, None, use), labels)
    assert not use.holds, "a loss that is let go of has nothing to wait for"


@pytest.mark.parametrize("name", ["shifted", "soft cap", "label smoothing", "of each token"])
def test_gradients_of_gradients(name: str) -> None:
    found = []
    for layer in (F.linear, lambda *given: deferred_linear(*given, Use())):
        torch.manual_seed(1)
        x = torch.randn(3, 13, WIDTH, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(WORDS, dtype=torch.float64, requires_grad=True)
        loss = IN_CHUNKS[name](layer(x, weight, bias), torch.arange(39).view(3, 13))
        penalty = sum(
            each.square().sum() for each in torch.autograd.grad(loss, (x, weight, bias), create_graph=True)
        )
        found.append(torch.autograd.grad(loss + penalty, (x, weight, bias)))
    torch.testing.assert_close(found[1], found[0])


def test_half_precision_keeps_the_factor_of_the_loss() -> None:
    """A gradient of 1 would be too small in 16 bits; scaled by 65536 it is not."""
    grads = []
    for layer in (F.linear, lambda *given: deferred_linear(*given, Use())):
        torch.manual_seed(0)
        x = torch.randn(3000, WIDTH, dtype=torch.float16, requires_grad=True)
        weight = (torch.randn(WORDS, WIDTH) / 9).to(torch.float16).requires_grad_()
        loss = F.cross_entropy(layer(x, weight, None).float(), torch.arange(3000) % WORDS)
        (loss * 2.0**12).backward()
        grads.append((x.grad.float(), weight.grad.float()))
    for plain, found in zip(*grads, strict=True):
        assert (plain - found).norm() < 1e-2 * plain.norm()


def test_autocast_casts_the_layer() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        x, weight = torch.randn(4, WIDTH), torch.randn(WORDS, WIDTH)
        assert deferred_linear(x, weight, None, Use()).dtype == F.linear(x, weight).dtype == torch.bfloat16


def test_a_weight_that_has_changed_is_refused() -> None:
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    logits = deferred_linear(torch.randn(4, WIDTH), weight, None, Use())
    kept = deferred_linear(torch.randn(4, WIDTH), weight, None, Use())
    deferred_logits.settle()
    before = kept.sum().item()
    late = deferred_linear(torch.randn(4, WIDTH), weight, None, Use())
    with torch.no_grad():
        weight.add_(1.0)
    assert kept.sum().item() == before and logits.shape == (4, WORDS)
    with pytest.raises(UsageError, match='"chunked_loss"'):
        late.sum()


def test_values_are_read(tmp_path: Path) -> None:
    x, weight = torch.randn(2, WIDTH), torch.randn(WORDS, WIDTH)
    logits = deferred_linear(x, weight, None, Use())
    assert logits[0, 3].item() == F.linear(x, weight)[0, 3].item()
    assert (logits.numpy() == F.linear(x, weight).numpy()).all()
    logits = deferred_linear(x, weight, None, Use())
    assert torch.equal(copy.deepcopy(logits), F.linear(x, weight)) and logits.data_ptr()
    assert torch.equal(torch.from_dlpack(deferred_linear(x, weight, None, Use())), F.linear(x, weight))
    torch.save(logits, tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt"), F.linear(x, weight))
    assert logits.tolist() == F.linear(x, weight).tolist() and "Deferred" in repr(logits)
