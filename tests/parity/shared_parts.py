"""Replicas of a pipeline share parameters, whole in a step only; started by `test_shared_parts.py`.

    shared_parts.py --folder FOLDER --partitions 2 check...       with sharded_data_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.parity.zoo.case import MICROBATCHES
from weft.compat.modelparallel import interface as smp
from weft.errors import UsageError
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.tensor_parallel import is_cut

CHECKS = Checks()
ROWS, WORDS, WIDTH, STEPS = 16, 22, 12, 3
given = CHECKS.given


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 13)  # its bias has no dim that sharers divide
        self.outer = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    """A head tied to the words on another partition, frozen weights, a weight that code between units uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.blocks[1].inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def batch(number: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(number)
    x, y = torch.randint(WORDS, (2, ROWS, 3), generator=numbers)
    return x, y


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Job:
    """A model and what trains it; and the same in one process, on all samples."""

    def __init__(self, late: bool = False, net: nn.Module | None = None, **settings: Any) -> None:
        gc.collect()
        weft.init({"partitions": given.partitions, "microbatches": 4, **settings})
        net = Net() if net is None else net
        self.alone = copy.deepcopy(net)
        self.model = weft.DistributedModel(net)
        self.scaler = weft.amp.GradScaler("cpu", init_scale=64.0)
        self.optimizer: Any = None
        if not late:
            self.make_optimizer()
        self.plain = torch.optim.AdamW(self.alone.parameters(), lr=0.01, eps=1e-3)
        self.steps = 0
        self.norm = torch.zeros(())

        @weft.step
        def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(self.scaler.scale(loss))
            return loss

        self.step = step

    def make_optimizer(self) -> None:
        self.optimizer = weft.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        )

    def forward_and_backward(self, number: int) -> float:
        mine = [part.chunk(weft.rdp_size())[weft.rdp_rank()] for part in batch(number)]
        return float(self.step(self.model, *mine).reduce_mean())

    def train(self, steps: int = STEPS, max_norm: float = 1e9, adding_up: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            losses += [self.forward_and_backward(self.steps + n) for n in range(adding_up)]
            if self.optimizer is None:
                self.make_optimizer()
            self.scaler.unscale_(self.optimizer)
            self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.steps += adding_up
        return losses

    def train_alone(self, steps: int = STEPS, max_norm: float = 1e9, adding_up: int = 1) -> list[float]:
        """On the samples of this rank's replica the losses, on all samples the gradients."""
        losses = []
        for first in range(0, steps * adding_up, adding_up):
            self.plain.zero_grad()
            for number in range(first, first + adding_up):
                x, y = batch(number)
                with torch.no_grad():
                    mine = [part.chunk(weft.rdp_size())[weft.rdp_rank()] for part in (x, y)]
                    losses.append(loss_of(self.alone, *mine).item())
                loss_of(self.alone, x, y).backward()
            self.norm_alone = torch.nn.utils.clip_grad_norm_(self.alone.parameters(), max_norm)
            self.plain.step()
        return losses

    def compare(self) -> None:
        """The gradients, and the whole states, are those of one process."""
        alone = dict(self.alone.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            if parameter.requires_grad:
                found, expected = (
                    full_tensor(parameter.grad, parameter),
                    alone[name.removeprefix("module.")].grad,
                )
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(
            self.model.state_dict(), dict(self.alone.state_dict()), rtol=1e-5, atol=1e-6
        )
        mine, theirs = self.optimizer.state_dict(), self.plain.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            torch.testing.assert_close(mine["state"][number], state, rtol=1e-4, atol=1e-7)


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "gpipe", "zb_h1", "auto"):
        job = Job(pipeline=pipeline)
        assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
        job.compare()


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
    assert job.train(2, max_norm=0.05) == pytest.approx(job.train_alone(2, max_norm=0.05), rel=1e-5)
    assert float(job.norm) == pytest.approx(float(job.norm_alone), rel=1e-5)
    job.compare()
    mine = [p.grad for p in job.model.local_parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in job.alone.parameters() if p.grad is not None])
    assert float(torch.nn.utils.get_total_norm(mine)) == pytest.approx(float(total), rel=1e-4)
    own = [p for p in job.model.module.blocks[3].parameters() if p.grad is not None]
    alone = list(job.alone.blocks[3].parameters())
    expected = torch.nn.utils.clip_grad_norm_(alone, 0.001)
    found = torch.nn.utils.clip_grad_norm_(job.model.module.blocks[3].parameters(), 0.001)
    if own:  # the block is here
        assert float(found) == pytest.approx(float(expected), rel=1e-4)
        torch.testing.assert_close(full_tensor(own[0].grad, own[0]), alone[0].grad, rtol=1e-4, atol=1e-7)


@CHECKS.check
def gradients_add_up_over_steps() -> None:
    job = Job()
    assert job.train(2, adding_up=2) == pytest.approx(job.train_alone(2, adding_up=2), rel=1e-5)
    job.compare()
    other = Job()
    other.optimizer.zero_grad()
    with other.model.no_sync():
        other.forward_and_backward(0)
    other.train(0)
    assert all(is_cut(p) or p.numel() % 2 for p in other.model.local_parameters())


@CHECKS.check
def an_optimizer_may_be_made_after_the_first_step() -> None:
    job = Job(late=True)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    job.compare()


@CHECKS.check
def an_evaluation_leaves_shares() -> None:
    job = Job()
    job.train(1)
    job.train_alone(1)

    @weft.step
    def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y)

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
        job.model.load_state_dict({**state, "words.weight": torch.zeros(3, 3)})


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
    other = Job()
    other.optimizer = weft.DistributedOptimizer(torch.optim.Adafactor(other.model.parameters(), lr=0.01))
    with pytest.raises(UsageError, match='Adafactor updates a weight by .*"sharded_data_parallel_degree": 1'):
        other.train(1)


@CHECKS.of_each("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration")
def a_model_trains_as_in_one_process(name: str) -> None:
    gc.collect()
    case = CASES[name]
    weft.init({"partitions": given.partitions, "microbatches": MICROBATCHES})
    net = case.build()
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(case.optimizer_for(model.parameters()))
    plain = case.optimizer_for(alone.parameters())

    @weft.step
    def step(model: Any, batch: dict[str, Any]) -> Tensor:
        loss = case.loss(model(**batch, **case.options))
        model.backward(loss)
        return loss

    for number in range(STEPS):
        optimizer.zero_grad()
        loss = step(model, case.batch(number)).reduce_mean()  # the same one for all replicas
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        plain.zero_grad()
        losses = []
        for part in range(MICROBATCHES):
            rows = {key: each.chunk(MICROBATCHES)[part] for key, each in case.batch(number).items()}
            losses.append(case.loss(alone(**rows, **case.options)))
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        plain.step()
        assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert sum(map(is_cut, model.local_parameters())) > 4
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
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))

        @smp.step
        def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(loss)
            return loss

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
    """The first layout saves, and trains on; all others go on from there as it did."""
    folder = given.folder / "saves"
    job = Job()
    if not (folder / "newest").exists():
        job.train(2)
        weft.save_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
        weft.save_checkpoint(given.folder / "full", "two", partial=False, model=job.model)
        job.train(2)
        torch.save(job.model.state_dict(), given.folder / f"after-{weft.rank()}.pt")
        return
    weft.resume_from_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
    job.steps = 2
    job.train(2)
    state = torch.load(given.folder / "after-0.pt")
    torch.testing.assert_close(dict(job.model.state_dict()), dict(state), rtol=1e-5, atol=1e-6)
    full = torch.load(given.folder / "full" / "two")
    assert {name: value.shape for name, value in full.items()} == {n: v.shape for n, v in state.items()}


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
