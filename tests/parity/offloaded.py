"""Weights wait in host memory, and a model trains as in one process; started by `test_offloaded.py`.

    offloaded.py --folder FOLDER --partitions 2 check...       with offload_weights in WEFT_SET

Every rank asserts for itself; a job that ends well has passed. The model and the job are those of `shared_parts.py`.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.parity import gathered, shared_parts
from tests.parity.registry import Checks
from tests.parity.shared_parts import WIDTH, WORDS, Job, batch, loss_of
from tests.training import squares, step_of
from weft.runtime.allocator import resident_bytes
from weft.torch.gathering import host_weights

host_weights.LEAST_BYTES = 1
CHECKS = Checks()
CHECKS.given = given = shared_parts.given
CHECKS |= {
    check.__name__: check
    for check in (
        shared_parts.steps_give_the_weights_and_states_of_one_process,
        shared_parts.norms_are_those_of_the_whole_model,
        shared_parts.an_optimizer_may_be_made_after_the_first_step,
        shared_parts.a_whole_state_is_loaded_into_shares,
        shared_parts.saves_go_to_other_layouts,
        gathered.checkpointed_layers_are_gathered_again,
        gathered.a_weight_that_is_given_back_is_read,
    )
}
Deep = gathered.Deep


def waiting(model: Any) -> list[Tensor]:
    """The parameters of this rank that wait in host memory."""
    return [weight.parameter for weight in model.host_weights.by_layer.weights]


# Tied words, layers of one module, experts, checkpoints, code that reads other modules' weights, convolutions.
@CHECKS.of_each(
    "GPT2LMHeadModel", "LlamaForCausalLM", "AlbertForMaskedLM", "MixtralForCausalLM", "BertForMaskedLM",
    "GPT2LMHeadModel:checkpointed", "T5ForConditionalGeneration:checkpointed", "MambaForCausalLM", "Wav2Vec2ForCTC",
)  # fmt: skip
def a_model_trains_as_in_one_process(name: str) -> None:
    shared_parts.a_model_trains_as_in_one_process(name, waiting)


@CHECKS.check
def gradients_add_up_over_steps() -> None:
    Job().trains_as_one_process(2, adding_up=2)


def adapted() -> nn.Module:
    """A frozen base, adapters, and a head that is trained."""
    net = Deep().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = models.Adapter(block.up), models.Adapter(block.down)
    net.head.requires_grad_(True)
    return net


@CHECKS.check
def adapters_over_a_frozen_base() -> None:
    for pipeline in ("1f1b", "zb_h1"):
        job = Job(net=adapted(), pipeline=pipeline)
        job.trains_as_one_process()
        assert any(not each.requires_grad for each in waiting(job.model))


@CHECKS.check
def a_script_writes_between_steps() -> None:
    """In place, by another tensor, and by an optimizer that is not wrapped."""
    job = Job(net=Deep())
    plain = torch.optim.SGD([p for p in job.model.parameters() if p.requires_grad], lr=0.1)
    alone = torch.optim.SGD(job.alone.parameters(), lr=0.1)
    for number in range(3):
        assert job.train(1) == pytest.approx(job.train_alone(1, first=number), rel=1e-5)
        for net in (job.model.module, job.alone):
            with torch.no_grad():
                net.blocks[0].up.weight.add_(0.01)
            net.blocks[1].up.weight.data = net.blocks[1].up.weight.data * 1.01
        plain.step()
        alone.step()
        plain.zero_grad()
        alone.zero_grad()
    torch.testing.assert_close(job.model.state_dict(), job.alone.state_dict(), rtol=1e-5, atol=1e-6)
    job.model.module.double()
    job.alone.double()
    found = weft.step(loss_of)(job.model, *batch(0)).reduce_mean()
    torch.testing.assert_close(found.double(), loss_of(job.alone, *batch(0)).detach(), rtol=1e-6, atol=0)


class Rounded(torch.autograd.Function):
    """A product with a weight of whole numbers, which it keeps for the backward pass as what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.weight, ctx.scale = weight, scale
        return x @ (weight.float() * scale).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ (ctx.weight.float() * ctx.scale), None, None


class RoundedBlock(models.Block):
    """Its backward pass begins with such a product. `view`: which keeps a view of the weight, and not the weight."""

    def __init__(self, view: bool) -> None:
        super().__init__(WIDTH, 13, torch.tanh)
        whole = (self.down.weight.detach() * 100).round().to(torch.int8)
        self.down.weight = nn.Parameter(whole, requires_grad=False)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        weight = self.down.weight
        y = torch.tanh(self.up(self.norm(x)))
        return x + Rounded.apply(y, weight.view(WIDTH, 13) if self.view else weight, 0.01) + self.down.bias


@CHECKS.check
def weights_of_whole_numbers() -> None:
    for view in (False, True):
        torch.manual_seed(0)
        net = models.Words(WORDS, WIDTH, [RoundedBlock(view) for _ in range(4)], tied=False)
        job = Job(net=net)
        job.trains_as_one_process()
        assert any(weft.allgather(any(each.dtype == torch.int8 for each in waiting(job.model))))


class Counting(models.Block):
    """Its forward pass writes a weight, which it also reads: from the first step on, or later."""

    writes = True

    def __init__(self) -> None:
        super().__init__(WIDTH, 13, torch.tanh)
        self.calls = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if Counting.writes:
            with torch.no_grad():
                self.calls.add_(1)
        return super().forward(x) / (1 + self.calls.mean())


@CHECKS.check
def what_a_layer_writes_into_its_weights_is_kept() -> None:
    for late in (False, True):
        torch.manual_seed(0)
        Counting.writes = not late
        job = Job(net=models.Words(WORDS, WIDTH, [Counting() for _ in range(4)], tied=False))
        job.train(1)
        Counting.writes = True
        job.train(2)
        calls = [v for name, v in job.model.state_dict().items() if name.endswith("calls")]
        assert len(calls) == 4 and all((each == (8 if late else 12)).all() for each in calls), calls


@CHECKS.check
def an_evaluation_reads_and_writes_nothing() -> None:
    job = Job()
    job.train(1)
    job.train_alone(1)
    evaluate = weft.step(loss_of)
    job.model.eval()
    before = copy.deepcopy(job.model.state_dict())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = evaluate(job.model, *batch(7)).reduce_mean()
            torch.testing.assert_close(found, loss_of(job.alone, *batch(7)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(job.model.state_dict(), before, rtol=0, atol=0)
    job.model.train()
    assert job.train(1) == pytest.approx(job.train_alone(1, first=1), rel=1e-5)
    job.compare()


@CHECKS.check
def weights_that_are_made_late() -> None:
    net = partial(Deep, layers=2)
    with weft.delay_param_initialization():
        late = net()
    job = Job(net=net())
    job.train(1)
    state = copy.deepcopy(job.model.state_dict())
    other = Job(net=late, verify="off", late=True)
    other.train(1)
    other.model.load_state_dict(state)
    with torch.no_grad():
        found = weft.step(loss_of)(other.model, *batch(3)).reduce_mean()
        expected = weft.step(loss_of)(job.model, *batch(3)).reduce_mean()
    torch.testing.assert_close(found, expected)


WIDE = 768
"""Of a linear whose weight has 2.25 MiB."""


@CHECKS.check
def few_layers_are_resident() -> None:
    """Of a frozen base: the memory that the process has in a backward pass."""
    found = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(resident_bytes())
            return grad

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDE, WIDE).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(WIDE))

        def forward(self, x: Tensor) -> Tensor:
            return x + Look.apply(torch.tanh(self.base(x * self.scale)))

    def peak(offload: bool) -> tuple[int, int]:
        settings = {"partitions": given.partitions, "microbatches": 2, "auto_partition": False}
        weft.init({**settings, "offload_weights": offload})
        net = models.Chain(32, Layer)
        model = weft.DistributedModel(net)
        for number, block in enumerate(net.blocks):
            weft.set_partition(block, number * given.partitions // 32)
        for _ in range(2):
            found.clear()
            step_of(squares)(model, torch.ones(2, WIDE))
        return max(found), sum(p.nbytes for p in model.local_parameters())

    (away, held), (here, _) = peak(True), peak(False)
    assert away < here - 0.7 * held, (away, here, held)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
