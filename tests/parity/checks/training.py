"""What changes from step to step, and what is trained at all."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import ByAllGradients, step_of
from weft.errors import UsageError

from ..compare import Record, copies, gradients, train_alone
from ..split import train_split
from .harness import (
    MICROBATCHES,
    ROWS,
    WIDTH,
    adamw,
    assert_same,
    check,
    own_loss,
    placed,
    same_as_alone,
    seeded,
    sgd,
    squared_error,
    start,
    trained_alone,
    vectors,
)
from .modules import normalised
from .structure import attending_loss, numbered, sequences, tokens

train_step = step_of(squared_error)


@weft.step
def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """One step without a backward pass."""
    with torch.no_grad():
        return model(x)


@check
def optimizers_that_look_at_all_weights_need_them_on_one_rank() -> None:
    net = seeded(models.Chain)
    start()
    model = weft.DistributedModel(net)
    optimizers = [weft.DistributedOptimizer(ByAllGradients(net.parameters(), 0.1))]
    optimizers.append(ByAllGradients(net.parameters(), 0.1))
    for _ in range(2):
        train_step(model, vectors(steps=1)[0])
        before = model.state_dict()
        for optimizer in optimizers:
            with pytest.raises(UsageError, match='ByAllGradients looks at several weights .*"partitions": 1'):
                optimizer.step()
        after = model.state_dict()
        assert all(torch.equal(before[name], value) for name, value in after.items())
    for weight in net.parameters():
        weight.requires_grad_(weight._weft_owner == 0)
    for optimizer in optimizers:
        optimizer.step()


class Forced(torch.optim.SGD):
    """Takes a gradient that is missing for zeros, as Muon's own script does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.sub_(mean.lerp_(weight.grad, 0.5), alpha=group["lr"])


@check
def an_optimizer_that_needs_gradients_gets_its_ranks_parameters_alone() -> None:
    net = seeded(models.Chain)
    start()
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(Forced(net.parameters(), 0.1))
    train_step(model, vectors(steps=1)[0])
    optimizer.step()
    mine = {id(weight) for weight in model.local_parameters()}
    assert mine and {id(weight) for weight in optimizer.state} == mine
    assert len(optimizer.param_groups[0]["params"]) == len([*net.parameters()])


@check
def steps_without_zero_grad_add_up() -> None:
    net = seeded(models.Chain)
    start()
    model = weft.DistributedModel(net)
    batch = vectors(steps=1)[0]
    train_step(model, batch)
    once = gradients(model.local_named_parameters())
    train_step(model, batch)
    train_step(model, batch)
    thrice = gradients(model.local_named_parameters())
    expected = {name: 3 * grad for name, grad in once.items()}
    assert_same(Record(gradients=[thrice]), Record(gradients=[expected]))


@check
def gradients_of_different_steps_add_up() -> None:
    batches = vectors()
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    start()
    model = weft.DistributedModel(net)
    for batch in batches:
        train_step(model, batch)
        for part in zip(*(batch[name].chunk(MICROBATCHES) for name in "xy"), strict=True):
            (F.mse_loss(alone(part[0]), part[1]) / MICROBATCHES).backward()
    expected = Record(gradients=[gradients(alone.named_parameters())])
    assert_same(Record(gradients=[gradients(model.local_named_parameters())]), expected)


@check
def zeroed_gradients_may_stay_tensors() -> None:
    net = seeded(models.Chain)
    expected = trained_alone(net, vectors())
    start()
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    record = Record()
    for batch in vectors():
        optimizer.zero_grad(set_to_none=False)
        record.losses.append(train_step(model, batch).reduce_mean().item())
        record.gradients.append(gradients(model.local_named_parameters()))
        optimizer.step()
    assert_same(record, expected)


@check
def switching_between_training_and_evaluation() -> None:
    net = seeded(normalised)
    alone = copy.deepcopy(net)
    mine = sgd(alone.parameters())
    start()
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    for batch in vectors(rows=32):
        expected = trained_one_step(alone, batch, mine)
        optimizer.zero_grad()
        loss = train_step(model, batch).reduce_mean().item()
        optimizer.step()
        alone.eval()
        model.eval()
        outputs = evaluate(model, batch["y"]).concat()
        torch.testing.assert_close(outputs, alone(batch["y"]).detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        alone.train()
        model.train()
        assert all(module.training for module in model.modules())
    actual = Record(
        buffers=copies(model.local_named_buffers()), parameters=copies(model.local_named_parameters())
    )
    assert_same(
        actual, Record(buffers=copies(alone.named_buffers()), parameters=copies(alone.named_parameters()))
    )


def trained_one_step(net: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
    """One step of one process; gives the mean loss."""
    optimizer.zero_grad()
    total = 0.0
    for x, y in zip(batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES), strict=True):
        loss = F.mse_loss(net(x), y) / MICROBATCHES
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@check
def evaluation_before_any_training() -> list[float]:
    net = seeded(normalised).eval()
    alone = copy.deepcopy(net)
    batch = vectors(rows=32)[0]
    start()
    model = weft.DistributedModel(net)
    outputs = evaluate(model, batch["x"]).concat()
    torch.testing.assert_close(outputs, alone(batch["x"]).detach(), rtol=1e-5, atol=1e-6)
    assert not outputs.requires_grad
    assert all(p.grad is None for p in model.local_parameters())
    alone.train()
    model.train()
    mine = sgd(alone.parameters())
    expected = trained_one_step(alone, batch, mine)
    loss = train_step(model, batch).reduce_mean().item()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert_same(
        Record(buffers=copies(model.local_named_buffers())), Record(buffers=copies(alone.named_buffers()))
    )
    return outputs.sum(1).tolist()


@check
def evaluation_whose_results_require_gradients() -> None:
    """Without `no_grad` and without `backward`: nothing may be kept, nothing waited for."""
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    start()
    model = weft.DistributedModel(net)
    step = weft.step(lambda model, x: model(x))
    for batch in vectors():
        outputs = step(model, batch["x"]).concat()
        torch.testing.assert_close(outputs, alone(batch["x"]).detach(), rtol=1e-5, atol=1e-6)
        assert all(p.grad is None for p in model.local_parameters())


@check
def sequence_length_changes_from_step_to_step() -> None:
    batches = [sequences(length)[0] for length in (6, 3, 9, 6, 1)]
    places = {**numbered("encoder", [0, 1]), **numbered("decoder", [0, 1, 0, 1])}
    for where in (places, None):
        same_as_alone(seeded(models.CrossAttending), batches, attending_loss, places=where)


@check
def batch_size_changes_from_step_to_step() -> None:
    batches = [vectors(rows=rows)[0] for rows in (8, 4, 12, 8, 16)]
    for places in (numbered("blocks", [0, 1, 0, 1]), None):
        same_as_alone(seeded(models.Chain), batches, places=places)


@check
def batch_size_and_length_change_with_tied_weights() -> None:
    batches = [tokens(length, 1, rows)[0] for length, rows in ((6, 8), (3, 16), (9, 4), (6, 8))]
    same_as_alone(seeded(models.Tied), batches, own_loss)


class Depth(models.Chain):
    """As many blocks as the caller says, or as the first row's key says."""

    def forward(self, x: Tensor, depth: Any) -> Tensor:
        depth = int(depth[0]) if isinstance(depth, Tensor) else depth
        for block in self.blocks[:depth]:
            x = block(x)
        return x * 2


def depth_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["depth"]), batch["y"])


@check
def control_flow_changes_from_step_to_step() -> None:
    batches = [{**batch, "depth": depth} for batch, depth in zip(vectors(steps=4), (4, 1, 3, 2), strict=True)]
    for places in (numbered("blocks", [0, 1, 0, 1]), numbered("blocks", [0, 0, 1, 1]), None):
        same_as_alone(seeded(Depth), batches, depth_loss, places=places)


@check
def control_flow_changes_between_microbatches() -> None:
    depths = [[4, 2, 3, 1], [1, 1, 1, 1], [2, 4, 1, 3]]
    batches = [
        {**batch, "depth": torch.tensor(depth).repeat_interleave(ROWS // MICROBATCHES)}
        for batch, depth in zip(vectors(), depths, strict=True)
    ]
    for places in (numbered("blocks", [0, 1, 0, 1]), numbered("blocks", [0, 0, 1, 1]), None):
        same_as_alone(seeded(Depth), batches, depth_loss, places=places)


def frozen(net: nn.Module, *names: str) -> nn.Module:
    """The network with the parameters below these modules fixed."""
    for name in names:
        net.get_submodule(name).requires_grad_(False)
    return net


@check
def frozen_parameters() -> None:
    for fixed in (
        ["blocks.0", "blocks.1"],
        ["blocks.1", "blocks.2"],
        ["blocks.2", "blocks.3"],
        ["blocks.0.up"],
    ):
        for places in (numbered("blocks", [0, 0, 1, 1]), numbered("blocks", [0, 1, 0, 1]), None):
            same_as_alone(frozen(seeded(models.Chain), *fixed), vectors(), places=places)


class Whole8(Tensor):
    """A weight of whole numbers of 8 bits and a scale for each row, as torchao has them, which can do what it must."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Whole8:
        self: Whole8 = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)
        self.whole, self.scale = whole, scale
        return self

    @classmethod
    def of(cls, weight: Tensor) -> nn.Parameter:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return nn.Parameter(cls((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: None, size: Any, stride: Any) -> Whole8:
        return cls(inner["whole"], inner["scale"])

    def values(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].values(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, kinds, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(inner) for inner in (args[0].whole, args[0].scale)))
        raise NotImplementedError(f"{func} of a quantised weight")


def trains_beside(net: nn.Module, plain: nn.Module) -> tuple[Any, Any]:
    """A model, and its optimizer, after steps whose losses are those of `plain` in one process; frozen weights stay."""
    batches = vectors()
    trained = [each for each in plain.parameters() if each.requires_grad]
    expected = train_alone(plain, batches, squared_error, sgd(trained), MICROBATCHES)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(sgd([each for each in model.parameters() if each.requires_grad]))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(train_step(model, batch).reduce_mean().item())
        optimizer.step()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    return model, optimizer


class Laid(nn.Module):
    """A frozen linear whose weight has scales. In evaluation it turns both, and rounds them: as bitsandbytes does."""

    def __init__(self, inputs: int, results: int) -> None:
        super().__init__()
        weight = torch.randn(results, inputs) / inputs**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight.scales = models.Scales(torch.rand(results, 1) + 0.5)  # type: ignore[attr-defined]
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, results, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scales: Any = self.weight.scales  # type: ignore[attr-defined]
        if not self.training and not scales.turned:
            self.weight.data, scales.turned = self.weight.data.t().contiguous(), True
            scales.numbers = scales.numbers.bfloat16().float()
        weight = self.weight.t() if scales.turned else self.weight
        return torch.tanh(F.linear(x, weight * scales.numbers) + self.up(self.down(x)))


@check
def weights_laid_out_anew_in_evaluation() -> None:
    """The comparisons before the first step, which evaluate, leave weights and what hangs on them as they were."""
    start(verify="gradients")
    wide = WIDTH * 2

    def make() -> nn.Module:
        return nn.Sequential(*(Laid(*sizes) for sizes in [(WIDTH, wide), (wide, WIDTH)] * 2))

    trains_beside(seeded(make), seeded(make))


class Casting(nn.Module):
    """Gates by a linear that it casts itself, as routers of Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(torch.float32)
        return torch.tanh(self.linear(x)) * torch.sigmoid(self.gate(x))


@check
def weights_that_the_forward_pass_casts() -> None:
    """All ranks know the type that their owner gives them, whether they were made before or after the split."""
    for late in (False, True):
        start(verify="gradients")
        net, plain = (seeded(lambda: nn.Sequential(*(Casting() for _ in range(4)))) for _ in range(2))
        if late:
            with weft.delay_param_initialization(), pytest.MonkeyPatch.context() as patch:
                patch.setattr("weft.torch.delayed_parameters.SMALL", 0)
                net = nn.Sequential(*(Casting() for _ in range(4)))
                net.load_state_dict(copy.deepcopy(plain.state_dict()))
            assert net[0].gate.weight.is_meta
        model, _ = trains_beside(net, plain)
        state = model.state_dict()
        assert state["0.gate.weight"].dtype == state["3.gate.weight"].dtype == torch.float32
        torch.testing.assert_close(state, dict(plain.state_dict()))


def values_of(tensor: Tensor) -> Tensor:
    return tensor.values() if isinstance(tensor, Whole8) else tensor


@check
def adapters_over_quantised_weights() -> None:
    """A frozen weight that is made of others lies on one rank, in its own size, and is gathered as what it is."""

    class Adapted(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.base.weight = Whole8.of(self.base.weight)
            with torch.no_grad():
                self.base.weight.scale.mul_(1.0 + number * weft.rank())  # the first rank's counts
            self.base.bias.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    start(verify="gradients")
    net = seeded(lambda: nn.Sequential(*(Adapted(number) for number in range(4))))
    plain = seeded(lambda: nn.Sequential(*(Adapted(0) for _ in range(4))))
    before = {
        name: weight.values() for name, weight in plain.named_parameters() if isinstance(weight, Whole8)
    }
    model, optimizer = trains_beside(net, plain)
    state = model.state_dict()
    for name, weight in before.items():
        assert type(state[name]) is Whole8 and torch.equal(state[name].values(), weight), name
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(state[name], weight.detach())
    folder = weft.allgather(tempfile.mkdtemp())[0]
    weft.save_checkpoint(folder, "step", model=model, optimizer=optimizer)
    with torch.no_grad():
        for _, weight in model.local_named_parameters():
            (weight.scale if isinstance(weight, Whole8) else weight).zero_()
    weft.resume_from_checkpoint(folder, model=model, optimizer=optimizer)
    again = model.state_dict()
    for name, value in state.items():
        torch.testing.assert_close(values_of(again[name]), values_of(value), rtol=0, atol=0)
    here = [weight for _, weight in net.named_parameters() if isinstance(weight, Whole8)]
    held = sum(weight.whole.untyped_storage().nbytes() for weight in here)
    assert held < len(here) * WIDTH * WIDTH, "others hold nothing of it"


@check
def frozen_embedding_that_is_tied() -> None:
    same_as_alone(frozen(seeded(models.Tied), "embed"), tokens(), own_loss)


@check
def low_rank_adapters() -> None:
    def build() -> nn.Module:
        net = models.Chain().requires_grad_(False)
        for block in net.blocks:
            block.up, block.down = models.Adapter(block.up), models.Adapter(block.down)
        return net

    for places in (numbered("blocks", [0, 0, 1, 1]), None):
        same_as_alone(seeded(build), vectors(), optimizer_of=adamw, places=places)


@check
def parameters_without_a_gradient() -> None:
    class Net(models.Chain):
        def __init__(self) -> None:
            super().__init__()
            self.never = models.Block()
            self.lone = nn.Parameter(torch.ones(3))
            self.blocks[2].extra = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.never(x)
            return super().forward(x)

    for places in ({"never": 1, **numbered("blocks", [0, 1, 0, 1])}, None):
        same_as_alone(seeded(Net), vectors(), places=places)


@check
def partition_without_a_trainable_parameter() -> None:
    def net() -> nn.Module:
        return models.Stack(a=nn.Tanh(), b=models.Block(), c=nn.Softplus())

    for places in ({"a": 0, "b": 1, "c": 0}, {"a": 1, "b": 0, "c": 1}, {"a": 1, "b": 1, "c": 1}):
        same_as_alone(seeded(net), vectors(), places=places, optimizer_of=adamw)


@check
def requires_grad_changes_between_steps() -> None:
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    model = placed(net, numbered("blocks", [0, 1, 0, 1]))
    for step, batch in enumerate(vectors()):
        net.zero_grad()
        alone.zero_grad()
        for which in (net, alone):
            which.blocks[step].requires_grad_(step == 1)
        expected = trained_one_step(alone, batch, sgd([torch.zeros(1)]))
        torch.testing.assert_close(
            train_step(model, batch).reduce_mean().item(), expected, rtol=1e-5, atol=0.0
        )
        mine = Record(gradients=[gradients(model.local_named_parameters())])
        assert_same(mine, Record(gradients=[gradients(alone.named_parameters())]))


@check
def two_models_one_after_the_other() -> None:
    first, second = seeded(models.Chain), seeded(models.Ladder)
    for net in (first, second, seeded(models.Chain, 3)):
        expected = trained_alone(net, vectors())
        start(microbatches=MICROBATCHES)
        assert_same(train_split(net, vectors(), squared_error, sgd), expected)
