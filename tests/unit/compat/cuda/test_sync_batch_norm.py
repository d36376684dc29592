"""BatchNorm over processes, on a machine without CUDA."""

from __future__ import annotations

import torch
from torch import nn

from weft.compat.cuda.sync_batch_norm import SyncBatchNorm


def test_a_trained_model_is_converted_with_all_it_has_learnt():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net[1].weight.data.uniform_()
    for _ in range(3):
        net(torch.randn(8, 3))
    net.eval()
    x = torch.randn(5, 3)
    expected, before = net(x), {name: value.clone() for name, value in net.state_dict().items()}
    converted = SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[1], SyncBatchNorm) and not converted[1].training
    assert torch.equal(converted(x), expected)
    torch.testing.assert_close(dict(converted.state_dict()), before, rtol=0, atol=0)
