"""A step without values takes the types that it has with values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.torch.trace.without_values import AsWithValues, on_meta


class Rotary(nn.Module):
    """A product, part of it outside of autocast, as rotary embeddings of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        with torch.autocast(device_type=kind, enabled=False):
            single = self.linear(x)
        assert torch.amp.is_autocast_available(kind)
        lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return single, self.linear(x).to(lower)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_of_the_device_of_a_tensor(enabled: bool) -> None:
    net = Rotary()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        expected = [each.dtype for each in net(torch.ones(2, 4))]
        with on_meta(net), AsWithValues():
            found = [each.dtype for each in net(torch.ones(2, 4, device="meta"))]
    assert found == expected == [torch.float32, torch.bfloat16 if enabled else torch.float32]
