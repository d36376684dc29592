"""Worker: what axis `tp` promises besides equal numbers; see `registry`."""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.registry import Checks
from tests.parity.tensor_parallel_models import OWN, WIDTH, Mixture
from tests.parity.zoo import CASES
from weft.errors import UsageError
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel import Linear, Region, Splits, cut, full_tensor, is_cut
from weft.torch.tensor_parallel.apply import split
from weft.torch.tensor_parallel.find import find
from weft.torch.trace.dry_run import DryRun

CHECKS = Checks()
CPU = torch.device("cpu")


def in_parts(net: nn.Module, run: Any, experts: str = "auto") -> Splits:
    """Find on every rank by itself, and split."""
    with DryRun([net], Streams(CPU)).forward(run) as once:
        splits = find(net, once, dist.get_world_size(), experts=experts)
    split(net, splits, dist.group.WORLD, dist.get_rank(), dist.get_world_size(), CPU)
    return splits


def of_all(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


class Dropped(nn.Module):
    """Dropout on parts, between two linears, and on the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(x)
        self.seen = F.dropout(torch.ones_like(middle), 0.5, self.training)
        return F.dropout(self.down(middle * self.seen), 0.25, self.training)


@CHECKS.check
def dropout() -> None:
    torch.manual_seed(0)
    net, x = Dropped(), torch.randn(8, 5, WIDTH)
    in_parts(net, lambda: net(x).relu().sum())
    torch.manual_seed(1)
    first = net(x)
    mask = net.seen.to_local()
    one, other = of_all(mask)
    assert not torch.equal(one, other), "each part has a mask of its own"
    assert 0.4 < (mask == 0).float().mean() < 0.6 and set(mask.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(*of_all(first)), "what is whole is equal on all ranks"
    assert torch.equal(*of_all(torch.get_rng_state())), "the common stream went on together"
    second = net(x)
    assert not torch.equal(first, second), "the next call has other masks"
    torch.manual_seed(1)
    assert torch.equal(first, net(x)), "and the same seed the same"
    net.eval()
    state = torch.get_rng_state()
    net(x)
    assert torch.equal(state, torch.get_rng_state()), "nothing is drawn without dropout"


@CHECKS.check
def generate() -> None:
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"):
        case = CASES[name]
        net, batch = case.build(), case.batch(0)
        alone = copy.deepcopy(net)
        in_parts(net, lambda net=net, batch=batch: net(**batch).loss)
        prompt = batch["input_ids"][:2, :5]
        told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = alone.eval().generate(prompt, **told)
        assert torch.equal(net.eval().generate(prompt, **told), expected), name


@CHECKS.check
def evaluation() -> None:
    """Without gradients PyTorch's transformer layers take their weights by themselves, if they are let."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    nets = [layer, nn.TransformerEncoder(layer, 2)]
    x = torch.randn(8, 6, WIDTH)
    padding = torch.arange(6) >= torch.tensor([2, 3, 4, 5, 6, 6, 6, 6])[:, None]
    for net in nets:
        masked = {"src_key_padding_mask": padding}
        alone = copy.deepcopy(net).eval()
        assert in_parts(net, lambda net=net, masked=masked: net(x, **masked).sum()).regions
        net.eval()
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                expected, actual = alone(x, **masked), net(x, **masked)
            shown = (~padding).unsqueeze(-1)  # what is padded may be anything
            torch.testing.assert_close(actual * shown, expected * shown, atol=1e-5, rtol=1e-5)


@CHECKS.check
def twice() -> None:
    """Gradients of gradients are refused, not wrong."""
    torch.manual_seed(0)
    net, x = Dropped().eval(), torch.randn(8, 5, WIDTH, requires_grad=True)
    in_parts(net, lambda: net(x).relu().sum())
    (gradient,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.pow(2).sum().backward()


@CHECKS.check
def copies() -> None:
    case = OWN["gated by chunk"]
    net, batch = case.build(), case.batch(0)
    in_parts(net, lambda: net(**batch))
    copied = copy.deepcopy(net)
    expected, actual = net(**batch), copied(**batch)
    actual.backward()
    assert torch.equal(expected, actual)
    for name, parameter in copied.named_parameters():
        assert is_cut(parameter) == is_cut(net.get_parameter(name)), name
        assert parameter is not net.get_parameter(name) and net.get_parameter(name).grad is None
    with torch.no_grad():
        copied.get_parameter("net.layers.0.both.weight").zero_()
    assert torch.equal(net(**batch), expected) and not torch.equal(copied(**batch), expected)
    with pytest.raises(UsageError, match="split over axis tp cannot be pickled: save its state_dict"):
        torch.save(net, io.BytesIO())


@CHECKS.check
def idempotent() -> None:
    case = OWN["gated by chunk"]
    net, batch, size = case.build(), case.batch(0), dist.get_world_size()
    splits = find(net, lambda: net(**batch), size)
    expected, parameters = net(**batch), list(net.parameters())
    shapes = [p.shape for p in parameters]
    whole = torch.autograd.grad(expected, parameters, retain_graph=True, allow_unused=True)
    wrong = Splits(size, (Region("net", {"net.lost": Linear("row"), "net.head": Linear("column", (5,))}),))
    with pytest.raises(UsageError, match="it is for 3 ranks, and axis tp has 2"):
        split(net, Splits(3, splits.regions), dist.group.WORLD, dist.get_rank(), size, CPU)
    with pytest.raises(
        UsageError,
        match=r"the model has no linear net.lost; net.head: its 32 inputs and 5 results do not fit",
    ):
        split(net, wrong, dist.group.WORLD, dist.get_rank(), size, CPU)
    assert [p.shape for p in net.parameters()] == shapes, "nothing was changed"
    for _ in range(2):
        split(net, splits, dist.group.WORLD, dist.get_rank(), size, CPU)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    actual = net(**batch)
    torch.testing.assert_close(actual, expected)
    actual.backward()  # while the graph of ``expected`` is alive, with the whole parameters
    for parameter, gradient in zip(parameters, whole, strict=True):
        torch.testing.assert_close(parameter.grad, None if gradient is None else cut(gradient, parameter))


@CHECKS.check
def states() -> None:
    case = OWN["two heads of keys"]
    net, batch = case.build(), case.batch(0)
    alone = copy.deepcopy(net)
    in_parts(net, lambda: net(**batch))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (alone, net)]
    for model, optimizer in zip((alone, net), optimizers, strict=True):
        model(**batch).backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        other = alone.get_parameter(name)
        assert torch.equal(cut(full_tensor(parameter), parameter), parameter)
        torch.testing.assert_close(full_tensor(parameter, parameter.grad), other.grad, atol=1e-6, rtol=1e-4)
        for key, value in optimizers[1].state[parameter].items():
            expected = optimizers[0].state[other][key]
            torch.testing.assert_close(full_tensor(parameter, value), expected, atol=1e-6, rtol=1e-4)
    weight = net.get_parameter("net.layers.0.q.weight")
    with pytest.raises(UsageError, match=r"shape \(3, 3\) cannot be cut .* whole has shape \(32, 32\)"):
        cut(torch.zeros(3, 3), weight)


@CHECKS.check
def experts_that_the_run_did_not_need() -> None:
    """They are cut as the others are, and give the same when they are needed."""
    case = OWN["mixture"]
    net, batch = case.build(), case.batch(0)
    mixtures = [each for each in net.modules() if isinstance(each, Mixture)]

    def prefer(wanted: float) -> None:
        for each in mixtures:
            with torch.no_grad():
                each.router.bias[-1] = wanted

    alone = copy.deepcopy(net)
    prefer(-100.0)
    splits = in_parts(net, lambda: net(**batch), "expert_tensor_parallel")
    assert {f"net.layers.{n}" for n in ("0.experts.3.0", "1.experts.expert_3.2")} <= splits.linears().keys()
    assert "net.layers.0.experts.3" in [region.name for region in splits.regions]
    prefer(100.0)
    mixtures = [each for each in alone.modules() if isinstance(each, Mixture)]
    prefer(100.0)
    for each in (alone, net):
        each(**batch).backward()
    for name, parameter in net.named_parameters():
        expected = alone.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        if parameter.grad is not None:
            torch.testing.assert_close(full_tensor(parameter, parameter.grad), expected, atol=1e-6, rtol=1e-4)
    assert net.get_parameter("net.layers.0.experts.3.2.weight").grad is not None


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: dist.init_process_group("gloo"))
