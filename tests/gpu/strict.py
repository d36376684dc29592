"""Worker: an emulated GPU refuses what a GPU does, and counts what a GPU is waited for; see `test_emulated.py`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.emulated_tensors import WAITS

x = torch.arange(6.0, device="cuda").view(2, 3)
host = torch.ones(3)


def _refuses(call: Callable[[], Any], text: str) -> None:
    try:
        call()
    except (RuntimeError, TypeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {text}")


def refuses_tensors_of_two_devices() -> None:
    for call in (
        lambda: x + host, lambda: x.add_(host), lambda: torch.cat([x[0], host]), lambda: host.add_(x[0]),
        lambda: nn.functional.linear(x, host.expand(2, 3)), lambda: torch.where(host > 0, x, x),
    ):  # fmt: skip
        _refuses(call, "same device")
    _refuses(x.numpy, "to copy the tensor to host memory first")
    assert torch.equal((x + torch.tensor(2.0)).cpu(), x.cpu() + 2), "a CPU's numbers may take part"


def counts_waits() -> None:
    for call, kind in (
        (x.sum().item, "_local_scalar_dense"), (x.tolist, "copy to the host"), (x.cpu, "copy to the host"),
        (x.nonzero, "nonzero"),
        (lambda: bool(x.sum() > 1), "_local_scalar_dense"), (lambda: x[x > 1], "nonzero"),
        (lambda: x.masked_select(x > 1), "masked_select"), (lambda: host.to("cuda"), "copy to the device"),
        (lambda: torch.equal(x, x), "equal"), (torch.cuda.synchronize, "synchronize"),
    ):  # fmt: skip
        WAITS.found.clear()
        call()
        assert sum(WAITS.found.values()) == 1 and next(iter(WAITS.found)).startswith(kind), (
            kind,
            WAITS.found,
        )
    WAITS.found.clear()
    host.pin_memory().to("cuda", non_blocking=True)
    assert [*(x @ x.T).shape, *(x * 2).view(3, 2)[1:].shape] == [2, 2, 2, 2]
    assert not WAITS.found


def trains_as_the_cpu_does() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    there = copy.deepcopy(layer).cuda()
    batch = torch.randn(4, 5, 8)
    for net, rows in ((layer, batch), (there, batch.cuda())):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file)
    for name, value in layer.state_dict().items():
        assert loaded[name].is_cuda and type(there.get_parameter(name)) is nn.Parameter
        torch.testing.assert_close(loaded[name].cpu(), value)


def draws_of_its_own() -> None:
    torch.manual_seed(2)
    torch.cuda.manual_seed(3)
    before = torch.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(before, torch.get_rng_state())
    torch.cuda.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(3, device="cuda").cpu())


if __name__ == "__main__":
    refuses_tensors_of_two_devices()
    counts_waits()
    trains_as_the_cpu_does()
    draws_of_its_own()
    print("passed")
