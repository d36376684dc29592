"""weft's own rules for functions on tensors in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from weft.torch.context_parallel.rules import OWN, Positions
from weft.torch.pytorch.private import imagined_mesh
from weft.torch.pytorch.private_dtensor import take_plain_as_replicated
from weft.torch.tensor_parallel.functions import Functions, answering
from weft.torch.tensor_parallel.rules import RULES
from weft.torch.tensor_parallel.shard_group import ShardGroup, new_name

OF_A_DEVICE = {"_cudnn_rnn", "_lstm_mps", "miopen_rnn", "_scaled_dot_product_attention_math_for_mps"}
"""Below the functions of PyTorch that have rules."""
WITHOUT_PARTS = {
    "rand", "randn", "randint", "randperm", "_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_",
    "_flash_attention_forward_no_dropout_inplace", "_cudnn_attention_forward_no_dropout_inplace",
    "_nested_tensor_softmax_with_shape", "_fused_sdp_choice",
    "_triton_scaled_dot_attention",
}  # fmt: skip
"""They take no tensor that could be in parts, or draw nothing."""


def test_functions_that_draw_random_numbers_have_rules() -> None:
    """By itself PyTorch would draw the same numbers on every rank, for different parts."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    drawing = set()
    for name in names - OF_A_DEVICE - WITHOUT_PARTS:
        operator = getattr(torch.ops.aten, name, None)
        overloads = operator.overloads() if hasattr(operator, "overloads") else []
        if any(torch.Tag.nondeterministic_seeded in getattr(operator, each).tags for each in overloads):
            drawing |= {
                getattr(owner, name) for owner in (torch, Tensor, F) if callable(getattr(owner, name, None))
            }
    assert len(drawing) > 40
    assert not {*map(str, drawing - RULES.keys())}
    assert not {*map(str, drawing - OWN.keys())}


LARGE = (
    torch.rand(24, 8, generator=torch.Generator().manual_seed(1)),
    torch.ones(24),
    torch.eye(8),
    torch.ones(8),
)


def attention(x: Tensor) -> Tensor:
    """Attention below PyTorch's functions, which no rule for one of them sees."""
    weight, bias, out, last = LARGE
    return F.multi_head_attention_forward(
        x, x, x, 8, 2, weight, bias, None, None, False, 0.5, out, last, training=True, need_weights=True
    )[0]


# As an error the warning would be a reason for the whole.
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("kind", [Functions, Positions])
@pytest.mark.parametrize(
    "drawn",
    [
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: x.bernoulli(generator=torch.Generator().manual_seed(4)),
        lambda x: torch.bernoulli(x, generator=torch.Generator().manual_seed(4)),
        lambda x: (x * 1).bernoulli(0.5, generator=torch.Generator().manual_seed(4)),
        torch._standard_gamma,
        attention,
    ],
    ids=["dropout", "generator", "function", "rate", "gamma", "attention"],
)
def test_what_draws_sees_the_whole(kind: type[Functions], drawn: Callable[[Tensor], Tensor]) -> None:
    take_plain_as_replicated()
    part = torch.rand(4, 2, 8, generator=torch.Generator().manual_seed(2))
    with imagined_mesh(2, "cpu", new_name()) as mesh:  # the second rank has what the first one has
        torch.manual_seed(3)
        with answering(kind(ShardGroup(mesh, None, 0, 2))):
            found = drawn(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
    assert not isinstance(found, DTensor)
    torch.manual_seed(3)
    torch.testing.assert_close(found, drawn(torch.cat([part, part])))
