"""Optimizers that look at whole weights, where ranks have parts; started by `test_whole_updates.py`.

    whole_updates.py --folder FOLDER --partitions 2 check...       with the settings of the layout in WEFT_SET

Every rank asserts for itself; a job that ends well has passed. All is computed in double precision: Muon rounds to 16
bits, which makes much of the smallest difference.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.torch as weft
from tests import models
from tests.parity import experts, in_parts
from tests.parity.registry import Checks
from weft.compat.modelparallel import interface as smp
from weft.errors import UsageError
from weft.torch.replicas import whole_updates as updates
from weft.torch.tensor_parallel import cuts_of, is_cut

CHECKS = Checks()
given = CHECKS.given
ROWS, STEPS = 8, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-9}


class Own(Optimizer):
    """Adam for what is no matrix; what a matrix is updated by is the subclass's."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    update = self.direction(weight, weight.grad, self.state[weight], group["eps"])
                    weight.add_(update, alpha=-group["lr"])

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        raise NotImplementedError


def adam(grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
    if not state.get("count"):
        state |= {"count": 0, "first": torch.zeros_like(grad), "second": torch.zeros_like(grad)}
    state["count"] += 1
    state["first"].lerp_(grad, 0.1)
    state["second"].lerp_(grad.square(), 0.01)
    return state["first"] / (state["second"].sqrt() + eps)


class Lamb(Own):
    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        update = adam(grad, state, eps) + 0.1 * weight
        return update * (weight.norm() + 1) / (update.norm() + eps)


class Lars(Own):
    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        state["momentum"] = state.get("momentum", 0) * 0.9 + grad
        return state["momentum"] * (weight.norm() + 1) / (grad.norm() + eps)


class Shampoo(Own):
    """With three ranks a third of a weight has the shape of one of its states."""

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        if grad.ndim != 2:
            return adam(grad, state, eps)
        for name, square in (("rows", grad @ grad.T), ("columns", grad.T @ grad)):
            state[name] = state.get(name, 1e-3 * torch.eye(len(square))) + square
        return _power(state["rows"], -0.25) @ grad @ _power(state["columns"], -0.25)


class Soap(Own):
    """Adam in the basis of Shampoo's matrices."""

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        if grad.ndim != 2:
            return adam(grad, state, eps)
        for name, square in (("rows", grad @ grad.T), ("columns", grad.T @ grad)):
            state[name] = state.get(name, 0) * 0.9 + square + 1e-3 * torch.diag(torch.arange(len(square)))
        left, right = (torch.linalg.eigh(state[name])[1] for name in ("rows", "columns"))
        left, right = (each * each.sum(0).sign() for each in (left, right))  # one of two signs
        return left @ adam(left.T @ grad @ right, state, eps) @ right.T


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values**exponent @ vectors.T


def matrices_first(module: nn.Module) -> list[dict[str, Any]]:
    weights = list(module.parameters())
    matrices = [weight for weight in weights if weight.ndim == 2]
    return [{"params": matrices}, {"params": [w for w in weights if w.ndim != 2], "lr": 0.02}]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices, rest = matrices_first(module)
    return [torch.optim.Muon([matrices], lr=0.01), torch.optim.AdamW([rest])]


KINDS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon": muon,
    "Adafactor": lambda module: [torch.optim.Adafactor(matrices_first(module), lr=0.01)],
    "LAMB": lambda module: [Lamb(matrices_first(module))],
    "LARS": lambda module: [Lars(matrices_first(module))],
    "Shampoo": lambda module: [Shampoo(matrices_first(module))],
    "SOAP": lambda module: [Soap(matrices_first(module))],
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of_numbers(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def loss_of_words(model: Any, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words_net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Dropout(0.0), *(in_parts.Block(rate=0.0) for _ in range(4))]
    return models.Words(in_parts.WORDS, in_parts.WIDTH, blocks, tied=True, padding_idx=3)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "linears": (in_parts.network, lambda n: numbers(n, ROWS, in_parts.WIDTH), loss_of_numbers),
    "words": (words_net, in_parts.words_of, loss_of_words),
    "experts": (experts.network, lambda n: numbers(n, ROWS, 5, experts.WIDTH), loss_of_numbers),
}


class Job:
    """A model and the optimizers that train it; and the same in one process, on all samples."""

    def __init__(self, kind: str, net: str = "linears", **settings: Any) -> None:
        gc.collect()
        experts_are = {"experts": "expert_parallel"} if net == "experts" else {}
        given_settings = {"partitions": given.partitions, "microbatches": 2, "verify": "off"}
        weft.init({**given_settings, **experts_are, **settings})
        make, self.batch, self.loss = NETS[net]
        module = make()
        self.alone = copy.deepcopy(module)
        self.model = weft.DistributedModel(module)
        self.optimizers = [weft.DistributedOptimizer(each) for each in KINDS[kind](self.model)]
        self.plain = KINDS[kind](self.alone)
        self.steps = 0

        @weft.step
        def step(model: nn.Module, x: Tensor) -> Tensor:
            loss = self.loss(model, x)
            model.backward(loss)
            return loss

        self.step = step

    def train(self, steps: int = STEPS, before: Callable[[nn.Module], object] = lambda module: None) -> None:
        """The same number of steps of both."""
        for _ in range(steps):
            x = self.batch(self.steps)
            for optimizer in (*self.optimizers, *self.plain):
                optimizer.zero_grad()
            self.step(self.model, x.chunk(weft.rdp_size())[weft.rdp_rank()])
            self.loss(self.alone, x).backward()
            before(self.model.module)
            before(self.alone)
            for optimizer in (*self.optimizers, *self.plain):
                optimizer.step()
            self.steps += 1

    def compare(self) -> None:
        """The whole weights and states are those of one process."""
        torch.testing.assert_close(self.model.state_dict(), dict(self.alone.state_dict()), **CLOSE)
        for mine, plain in zip(self.optimizers, self.plain, strict=True):
            found, expected = mine.state_dict(), plain.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            assert found["state"].keys() == expected["state"].keys()
            for number, state in expected["state"].items():
                torch.testing.assert_close(found["state"][number], state, **CLOSE)


@CHECKS.of_each(*(f"{kind} {net}" for kind in KINDS for net in NETS))
def steps_are_those_of_one_process(which: str) -> None:
    job = Job(*which.split())
    job.train()
    assert any(map(is_cut, job.model.local_parameters()))
    job.compare()


@CHECKS.check
def a_rank_keeps_the_states_of_its_own_weights() -> None:
    """Each state is on one of the ranks that hold the weight, whole, and ranks keep about as much."""
    job = Job("LAMB")
    job.train(1)
    optimizer = job.optimizers[0]
    weights = optimizer.weights()
    kept = {n: optimizer.state[w] for n, w in enumerate(weights) if w in optimizer.state and is_cut(w)}
    alone = [w for group in job.plain[0].param_groups for w in group["params"]]
    assert all(entry["first"].shape == alone[number].shape for number, entry in kept.items())
    cut = {n: math.prod(ranks.size for _, ranks in cuts_of(w)) for n, w in enumerate(weights) if is_cut(w)}
    told = weft.allgather(([*cut], {n: cut[n] for n in kept}), weft.CommGroup.WORLD)
    owned = Counter[int]()
    for _, own in told:
        owned.update(own)
    assert owned == Counter(number for held, _ in told for number in held)
    of_these = [own for held, own in told if held == [*cut]]
    sizes = [sum(alone[number].numel() for number in own) for own in of_these]
    assert len(sizes) > 1 and max(sizes) - min(sizes) <= max(alone[number].numel() for number in cut), sizes


@CHECKS.check
def a_weight_without_a_gradient_is_left_alone() -> None:
    """A part without one counts as zeros where another rank has a gradient."""
    job = Job("LAMB")

    def forget(module: nn.Module) -> None:
        module[1].up.weight.grad = None
        grad = module[2].up.weight.grad
        if grad is not None and is_cut(module[2].up.weight):
            if (weft.tp_rank() if weft.tp_size() > 1 else weft.rdp_rank()) == 0:
                module[2].up.weight.grad = None
        elif grad is not None:
            grad[: len(grad) // 2] = 0

    job.train(1)
    job.train(2, forget)
    job.compare()
    job.train(1)
    job.compare()


@CHECKS.check
def clipping_and_scaling_come_before_the_update() -> None:
    job, scaler = Job("Adafactor"), weft.amp.GradScaler("cpu", init_scale=64.0)
    job.train(1, lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.05))
    job.compare()

    @weft.step
    def step(model: nn.Module, x: Tensor) -> None:
        model.backward(scaler.scale(job.loss(model, x)))

    for number, factor in enumerate((1.0, float("inf"), 1.0)):
        x = job.batch(number)
        job.optimizers[0].zero_grad()
        step(job.model, x.chunk(weft.rdp_size())[weft.rdp_rank()] * factor)
        scaler.step(job.optimizers[0])
        scaler.update()
        if factor == 1.0:
            job.plain[0].zero_grad()
            job.loss(job.alone, x).backward()
            job.plain[0].step()
    assert scaler.get_scale() == 32.0
    job.compare()


@CHECKS.check
def hooks_and_schedulers_work_once_a_step() -> None:
    job = Job("LAMB")
    calls: list[str] = []
    for optimizer in (*job.optimizers, *job.plain):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (*job.optimizers, *job.plain)]
    for _ in range(2):
        job.train(1)
        for scheduler in schedulers:
            scheduler.step()
    assert calls == ["before", "after"] * 4
    job.compare()


@CHECKS.check
def what_a_script_writes_between_steps_is_seen() -> None:
    job = Job("Adafactor")
    job.train(2, lambda module: [each.data.clamp_(-0.2, 0.2) for each in module.parameters()])
    job.compare()


@CHECKS.of_each(*KINDS)
def a_whole_state_is_loaded(kind: str) -> None:
    """From one process, into new optimizers and into some that have states; and back."""
    job = Job(kind)
    job.train(2)
    states = [copy.deepcopy(each.state_dict()) for each in job.plain]
    for steps in (0, 1):
        other = Job(kind)
        other.train(steps)
        for target in (other.model, other.alone):
            target.load_state_dict(job.alone.state_dict())
        for target, state in zip((*other.optimizers, *other.plain), states * 2, strict=True):
            target.load_state_dict(copy.deepcopy(state))
        other.steps = job.steps
        other.train(1)
        other.compare()
    for optimizer, state in zip(other.optimizers, states, strict=True):
        partial = optimizer.local_state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(partial)
    other.compare()


@CHECKS.of_each(*(f"{kind} {net}" for kind in KINDS for net in NETS))
def saves_go_to_other_layouts(which: str) -> None:
    """Each layout goes on where the one before has saved, before its first step or after it, and saves."""
    folder, alone = given.folder / which, given.folder / f"{which}.pt"
    for late in (False, True) if alone.exists() else (False,):
        job = Job(*which.split())
        if alone.exists():
            job.train(late)
            weft.resume_from_checkpoint(folder, "saved", model=job.model, optimizer=job.optimizers)
            for target, state in zip((job.alone, *job.plain), torch.load(alone), strict=True):
                target.load_state_dict(state)
            job.steps = 7
        job.train(1)
        job.compare()
    if weft.rank() == 0:
        torch.save([each.state_dict() for each in (job.alone, *job.plain)], alone)
    weft.save_checkpoint(folder, "saved", model=job.model, optimizer=job.optimizers)


class AllAtOnce(Lamb):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [w.grad for group in self.param_groups for w in group["params"] if w.grad is not None]
        for grad in grads:
            grad.div_(1 + torch.stack([each.norm() for each in grads]).norm())
        super().step(closure)


@CHECKS.check
def what_would_take_a_part_for_all_of_a_weight_is_refused() -> None:
    job = Job("Adafactor")
    plain = torch.optim.Adafactor(job.model.parameters())
    job.train(1)
    with pytest.raises(UsageError, match=r"wrap it, optimizer = weft\.DistributedOptimizer\(Adafactor\("):
        plain.step()
    job.optimizers[0].zero_grad()
    plain.step()  # there is nothing to do
    wrapped = weft.DistributedOptimizer(AllAtOnce(job.model.parameters()))
    job.step(job.model, job.batch(0).chunk(weft.rdp_size())[weft.rdp_rank()])
    with pytest.raises(UsageError, match="AllAtOnce (updates|looks at) several weights at once"):
        wrapped.step()


class Copies:
    """Training in 16 bits, with 32-bit copies."""

    def __init__(self, split: dict[str, Any]) -> None:
        gc.collect()
        whole = {"partitions": 2, "tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1}
        others = {
            "microbatches": 2,
            "inputs": "equal",
            "shard_optimizer_state": False,
            "verify": "off",
            "sdp_gradient_clipping": 1e9,
        }
        smp.init({"bf16": True, **others, **whole, **split})
        self.model = smp.DistributedModel(in_parts.network())
        self.optimizer = smp.DistributedOptimizer(Lars(self.model.parameters()))

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(loss_of_numbers(model, x.bfloat16()).float())

        self.step = step

    def train(self, number: int) -> dict[str, Any]:
        """The state after a step."""
        x = numbers(number, ROWS, in_parts.WIDTH)
        self.optimizer.zero_grad()
        self.step(self.model, x.chunk(weft.rdp_size())[weft.rdp_rank()])
        self.optimizer.step()
        return copy.deepcopy(self.optimizer.state_dict())


@CHECKS.check
def copies_of_16_bit_weights_are_updated_whole() -> None:
    """In each layout as where weights are whole; states and checkpoints go from one to the next."""
    folder, known = given.folder / "copies", list[dict[str, Any]]()
    parts: list[dict[str, Any]] = [
        {"partitions": 1, "tensor_parallel_degree": 2}, {"sharded_data_parallel_degree": 2},
    ]  # fmt: skip
    for number, split in enumerate([{}, *parts, {}]):
        job = Copies(split)
        first = job.train(0)
        weft.save_checkpoint(folder, f"saved{number}", model=job.model, optimizer=job.optimizer)
        found = [first, job.train(1)]
        if number:
            job = Copies(split)
            weft.resume_from_checkpoint(
                folder, f"saved{number - 1}", model=job.model, optimizer=job.optimizer
            )
            found += [job.train(1)]
            job.optimizer.load_state_dict(known[0])
            found += [job.optimizer.state_dict()]
        known = known or found
        for state, expected in zip(found, [*known, known[1], known[0]], strict=False):
            torch.testing.assert_close(state["fp32_masters"], expected["fp32_masters"], rtol=1e-2, atol=2e-3)
            torch.testing.assert_close(state["state"], expected["state"], rtol=5e-2, atol=1e-3)
        del job
    smp.init({"bf16": False})


def start() -> None:
    torch.set_default_dtype(torch.float64)
    updates.BUCKET_BYTES = 4000  # so that there are several


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], start)
