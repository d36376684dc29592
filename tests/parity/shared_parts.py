"""Replicas of a pipeline share parameters, whole in a step only; started by `test_shared_parts.py`.

    shared_parts.py --folder FOLDER --partitions 2 check...       with sharded_data_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models, training
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.parity.zoo.case import MICROBATCHES
from tests.training import STEPS, start, step_of
from weft.compat.modelparallel import interface as smp
from weft.errors import UsageError
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.tensor_parallel import is_cut

CHECKS = Checks()
ROWS, WORDS, WIDTH = 16, 22, 12
given = CHECKS.given


Block = partial(models.Block, WIDTH, 13, torch.tanh)
"""The bias between its linears has no dim that sharers divide."""


class Net(models.Words):
    """A head tied to the words on another partition, frozen weights, a weight that code between units uses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(WORDS, WIDTH, [Block() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(words) * self.scale)


def batch(number: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(number)
    x, y = torch.randint(WORDS, (2, ROWS, 3), generator=numbers)
    return x, y


optimizer_of = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Job(training.Job):
    """A model and what trains it; and the same in one process, on all samples."""

    def __init__(self, late: bool = False, net: nn.Module | None = None, **settings: Any) -> None:
        start(**{"partitions": given.partitions, "microbatches": 4, **settings})
        super().__init__(net or Net(), loss_of, optimizer_of, batch, late=late, scale=64.0, atol=1e-6)

    def compare(self) -> None:
        self.compare_gradients()
        super().compare()


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "gpipe", "zb_h1", "auto"):
        job = Job(pipeline=pipeline)
        job.trains_as_one_process()


@CHECKS.check
def a_rank_holds_its_share() -> None:
    job = Job()
    whole_bytes: list[int] = []
    job.model.register_post_partition_hook(
        lambda model, _: whole_bytes.append(sum(p.nbytes for p in model.local_parameters()))
    )
    job.train(2)
    mine = list(job.model.local_parameters())
    odd = sum(p.nbytes for p in mine if not is_cut(p))
    held = sum(p.untyped_storage().nbytes() for p in mine)
    assert held == sum(p.nbytes for p in mine) == (whole_bytes[0] - odd) / 2 + odd
    assert odd < 0.1 * held
    trained = sum(p.nbytes for p in mine if p.requires_grad)
    grads = [p.grad for p in mine if p.grad is not None]
    assert sum(grad.untyped_storage().nbytes() for grad in grads) == trained
    states = [s for entry in job.optimizer.optimizer.state.values() for s in entry.values() if s.dim()]
    assert sum(s.untyped_storage().nbytes() for s in states) == 2 * trained


@CHECKS.check
def norms_are_those_of_the_whole_model() -> None:
    job = Job()
    job.clips_as_one_process()
    here = {id(p) for p in job.model.local_parameters()}
    own = [p for p in job.model.module.blocks[3].parameters() if p.grad is not None and id(p) in here]
    alone = list(job.alone.blocks[3].parameters())
    expected = torch.nn.utils.clip_grad_norm_(alone, 0.001)
    found = torch.nn.utils.clip_grad_norm_(job.model.module.blocks[3].parameters(), 0.001)
    if own:  # the block is here
        assert float(found) == pytest.approx(float(expected), rel=1e-4)
        torch.testing.assert_close(full_tensor(own[0].grad, own[0]), alone[0].grad, rtol=1e-4, atol=1e-7)


@CHECKS.check
def gradients_add_up_over_steps() -> None:
    job = Job()
    job.trains_as_one_process(2, adding_up=2)
    other = Job()
    other.optimizer.zero_grad()
    with other.model.no_sync():
        other.step(other.model, *other.mine(0))
    other.train(0)
    assert all(is_cut(p) or p.numel() % 2 for p in other.model.local_parameters())


@CHECKS.check
def an_optimizer_may_be_made_after_the_first_step() -> None:
    job = Job(late=True)
    job.trains_as_one_process()


@CHECKS.check
def an_evaluation_leaves_shares() -> None:
    job = Job()
    job.train(1)
    job.train_alone(1)

    evaluate = weft.step(loss_of)
    job.model.eval()
    with torch.no_grad():
        found = evaluate(job.model, *batch(7)).reduce_mean()
        torch.testing.assert_close(found, loss_of(job.alone, *batch(7)), rtol=1e-5, atol=1e-6)
    assert any(is_cut(p) for p in job.model.local_parameters())
    job.model.train()
    assert all(p.grad is not None for p in job.model.local_parameters() if p.requires_grad)


@CHECKS.check
def a_whole_state_is_loaded_into_shares() -> None:
    job = Job()
    job.train(2)
    state, states = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    Net().load_state_dict(state)
    expected, number = job.train(1), job.steps - 1
    for late in (False, True):
        other = Job()
        if late:
            other.train(1)
        other.model.load_state_dict(state)
        other.optimizer.load_state_dict(copy.deepcopy(states))
        other.steps = number
        assert other.train(1) == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(other.model.state_dict(), job.model.state_dict(), rtol=1e-6, atol=1e-7)
    with pytest.raises(UsageError, match=r"has the shape \[3, 3\], the model needs \[22, 12\]"):
        job.model.load_state_dict({**state, "embed.weight": torch.zeros(3, 3)})


@CHECKS.check
def what_does_not_fit_is_told() -> None:
    job = Job()
    with pytest.raises(UsageError, match=r"join\(\) does not fit"), job.model.join():
        pass
    with pytest.raises(UsageError, match="a communication hook does not fit sharded_data_parallel_degree"):
        job.model.register_comm_hook(None, lambda state, bucket: None)
    job.train(1)
    with pytest.raises(UsageError, match="shared by replicas"):
        copy.deepcopy(job.model)


@CHECKS.of_each("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration")
def a_model_trains_as_in_one_process(
    name: str, held: Callable[[Any], list[Tensor]] = lambda model: [*filter(is_cut, model.local_parameters())]
) -> None:
    """`held`: the parameters of a model that are cut, or elsewhere."""
    gc.collect()
    case = CASES[name]
    weft.init({"partitions": given.partitions, "microbatches": MICROBATCHES})
    net = case.build()
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(case.optimizer_for(model.parameters()))
    plain = case.optimizer_for(alone.parameters())
    step = step_of(case.loss_of)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = step(model, case.batch(number)).reduce_mean()  # the same one for all replicas
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        plain.zero_grad()
        losses = []
        for part in range(MICROBATCHES):
            rows = {key: each.chunk(MICROBATCHES)[part] for key, each in case.batch(number).items()}
            losses.append(case.loss_of(alone, rows))
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        plain.step()
        assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert len(held(model)) > 4
    mine, theirs = dict(model.state_dict()), dict(alone.state_dict())
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@CHECKS.check
def scripts_in_16_bits() -> None:
    """As the original does: gradients are clipped in `optimizer.step()`, and 32-bit masters are updated."""
    records = []
    for degree in (1, 2):
        gc.collect()
        smp.init({"partitions": given.partitions, "microbatches": 2, "bf16": True, "sdp_gradient_clipping": 0.05,
                  "shard_optimizer_state": False, "sharded_data_parallel_degree": degree})  # fmt: skip
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        step = step_of(loss_of)
        losses, norms = [], []
        for number in range(STEPS):
            optimizer.zero_grad()
            losses.append(step(model, *batch(number)).reduce_mean().item())
            norm = optimizer.clip_master_grads(0.05) if degree == 1 else None
            optimizer.step()
            norms.append(float(optimizer._global_grad_norm if norm is None else norm))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        records.append((losses, norms, state["fp32_masters"]))
        del model, optimizer
    smp.init({"bf16": False})
    (losses, norms, masters), (shared_losses, shared_norms, shared_masters) = records
    assert min(norms) > 0.05, "nothing is clipped"
    assert shared_losses == pytest.approx(losses, rel=1e-3)
    assert shared_norms == pytest.approx(norms, rel=1e-2)
    assert masters.keys() == shared_masters.keys()
    for number, master in masters.items():
        torch.testing.assert_close(shared_masters[number], master, rtol=1e-3, atol=1e-4)


@CHECKS.check
def shares_that_a_script_replaced_are_refused() -> None:
    job = Job()
    job.train(1)
    for parameter in job.model.local_parameters():
        parameter.data = torch.zeros(5, 5)
    with pytest.raises(UsageError, match=r"has the shape \[5, 5\] before a step, but this rank's share"):
        job.train(1)


@CHECKS.check
def saves_go_to_other_layouts() -> None:
    Job().goes_to_other_layouts(given.folder / "saves")


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
