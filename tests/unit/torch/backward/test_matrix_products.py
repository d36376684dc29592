"""Products of weft's own are right by either library, and go to the quicker one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.torch.backward import matrix_products
from weft.torch.backward.matrix_products import GAIN, Multiplier
from weft.torch.backward.weight_gradients import run_all
from weft.torch.pytorch.private import onednn_product

from .test_weight_gradients import DEFERRED, WHOLE, Applied, apart, backward, in_halves

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN to compare with"
)
ROWS, COLUMNS, LENGTH = 256, 320, 128


class Measured(Multiplier):
    """oneDNN counts as the quicker library, whatever the machine is. `by_onednn`: how many products it made."""

    onednn_is_quicker = True

    def __init__(self, **limits: int) -> None:
        super().__init__(onednn=self.note, **limits)
        self.by_onednn = 0

    def note(self, left: Tensor, right: Tensor) -> Tensor:
        self.by_onednn += 1
        return onednn_product(left, right)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


DENSE = ("rows", "columns")
LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": numbers,
    "columns": lambda n, m: numbers(m, n).t(),
    "a part of each row": lambda n, m: numbers(n, 3 * m)[:, m : 2 * m],
    "every other row": lambda n, m: numbers(2 * n, m)[::2],
    "every other column": lambda n, m: numbers(n, 2 * m)[:, ::2],
    "one row for all": lambda n, m: numbers(1, m).expand(n, m),
    "one number for all": lambda n, m: numbers(1, 1).expand(n, m),
}


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_every_layout_gives_the_product(left: str, right: str, measured: Measured):
    one, other = LAYOUTS[left](ROWS, LENGTH), LAYOUTS[right](LENGTH, COLUMNS)
    wide, other_wide = one.contiguous().double(), other.contiguous().double()
    exact = wide @ other_wide
    bound = LENGTH * 2**-24 * (wide.abs() @ other_wide.abs())  # Higham, Accuracy and Stability, (3.13)
    assert ((measured.product(one, other) - exact).abs() <= bound).all()
    held = torch.ones(ROWS, COLUMNS)
    memory = held.data_ptr()
    measured.adder(held, one, other, 0.5)()
    assert held.data_ptr() == memory
    assert ((held - 1 - exact / 2).abs() <= bound + 2**-24 * held.abs()).all()
    assert measured.by_onednn == (2 if {left, right} <= {*DENSE} else 0)


class Own(Tensor):
    """A tensor of somebody's own, who may count its operations."""


@pytest.mark.parametrize(
    "operands",
    [
        (numbers(200, 200), numbers(200, 200)),
        (numbers(1 << 12, 8), numbers(8, 1 << 9)),
        (numbers(ROWS, 0), numbers(0, COLUMNS)),
        (numbers(ROWS, LENGTH, dtype=torch.float64), numbers(LENGTH, COLUMNS, dtype=torch.float64)),
        (numbers(ROWS, LENGTH).bfloat16(), numbers(LENGTH, COLUMNS).bfloat16()),
        (numbers(ROWS, LENGTH).as_subclass(Own), numbers(LENGTH, COLUMNS)),
    ],
    ids=["small", "narrow", "empty", "64 bits", "16 bits", "a subclass"],
)
def test_what_gains_nothing_stays_with_pytorch(operands: tuple[Tensor, Tensor], measured: Measured):
    assert torch.equal(measured.product(*operands), operands[0] @ operands[1])
    held = torch.ones(len(operands[0]), operands[1].shape[1], dtype=operands[0].dtype)
    expected = held.clone().addmm_(*operands, alpha=2)
    measured.adder(held, *operands, 2)()
    assert torch.equal(held, expected)
    assert not measured.by_onednn


def test_with_pytorchs_switch_off_nothing_goes_to_onednn(measured: Measured, monkeypatch: pytest.MonkeyPatch):
    operands = numbers(ROWS, LENGTH), numbers(LENGTH, COLUMNS)
    measured.product(*operands)
    assert measured.by_onednn == 1
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    measured.product(*operands)
    assert measured.by_onednn == 1


def test_where_it_is_not_allowed_nothing_goes_to_onednn(measured: Measured):
    measured.allowed = False
    measured.product(numbers(ROWS, LENGTH), numbers(LENGTH, COLUMNS))
    assert not measured.by_onednn


@pytest.mark.parametrize(("onednn_s", "quicker"), [(1.0, True), (1.8, False), (2.5, False)])
def test_the_quicker_library_is_measured(onednn_s: float, quicker: bool):
    """PyTorch's products take 2 s here, and each first one much longer."""
    times = iter([30.0, 40.0] + [2.0, onednn_s] * 4)

    def seconds(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    assert quicker is (onednn_s < GAIN * 2.0)
    assert Multiplier(seconds=seconds).onednn_is_quicker is quicker


def test_a_pytorch_with_another_operator_multiplies_by_itself():
    def other(*_: Any) -> Tensor:
        raise RuntimeError("expected at most 5 arguments")

    assert not Multiplier(onednn=other).onednn_is_quicker


@pytest.mark.parametrize("name", [*DEFERRED, *WHOLE])
def test_gradients_by_onednn_are_those_of_autograd(name: str, monkeypatch: pytest.MonkeyPatch):
    """In halves and at once, also the smallest products."""
    measured = Measured(least=1, shortest=1)
    monkeypatch.setattr(matrix_products, "multiplier", measured)
    monkeypatch.setattr("weft.torch.backward.weight_gradients.FUSED_BYTES", 0)
    use, x, *shapes = {**DEFERRED, **WHOLE}[name]
    expected, of_x = backward(Applied(use, *shapes), x)
    found, also_of_x, _ = in_halves(Applied(use, *shapes), x)
    torch.testing.assert_close((*found, also_of_x), (*expected, of_x))
    net = Applied(use, *shapes)
    _, also_of_x = apart(net, x, 2, lambda task: task.at_once(), at_once=True)
    torch.testing.assert_close(([p.grad for p in net.parameters()], also_of_x), (expected, of_x))
    multiplies = name in ("linear", "linear without bias", "matmul", "operator", "addmm", "a vector")
    assert measured.by_onednn == 4 * multiplies


def test_a_large_layer_learns_by_onednn(measured: Measured, monkeypatch: pytest.MonkeyPatch):
    """Whose first gradient is made, the next added to."""
    monkeypatch.setattr(matrix_products, "multiplier", measured)
    torch.manual_seed(0)
    net = nn.Linear(LENGTH, COLUMNS)
    x = numbers(3, ROWS, LENGTH)
    tasks: list[Any] = []
    apart(net, x, 2, tasks.append)
    run_all(tasks)
    assert measured.by_onednn == 2
    exact, _ = backward(copy.deepcopy(net).double(), x.double())
    assert net.weight.grad is not None
    assert exact[0] is not None
    assert (net.weight.grad - exact[0]).abs().max() < 1e-5 * exact[0].abs().max()
