"""One process and one partition: plain training, to the last bit; and errors of using things too early."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests.unit.torch.networks import WIDTH, Chain, Normed
from weft.errors import ConfigError, SplitError, UsageError

Init = Callable[..., None]
ROWS = 12


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=numbers), torch.randn(rows, WIDTH, generator=numbers)


@weft.step
def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def trained_plainly(net: nn.Module, microbatches: int, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = []
        for x, y in zip(*(t.chunk(microbatches) for t in batch()), strict=True):
            loss = F.mse_loss(net(x), y)
            (loss / microbatches).backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(torch.stack(parts).mean().item())
    return losses


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("network", [Chain, Normed])
def test_a_step_is_plain_accumulation(network: type[nn.Module], microbatches: int, init: Init):
    torch.manual_seed(0)
    net = network()
    plain = copy.deepcopy(net)
    torch.manual_seed(7)
    expected = trained_plainly(plain, microbatches)
    init(microbatches=microbatches)
    model = weft.DistributedModel(net)
    assert model.partitioned and model.get_module() is net
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(train_step(model, *batch()).reduce_mean().item())
        optimizer.step()
    assert losses == expected
    for (name, a), (_, b) in zip(net.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_gradients_add_up_over_steps_without_zero_grad(init: Init):
    init(microbatches=2)
    model = weft.DistributedModel(Chain(1))
    train_step(model, *batch())
    once = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        train_step(model, *batch())
    for grad, p in zip(once, model.parameters(), strict=True):
        assert torch.allclose(p.grad, 3 * grad)


def test_gradients_may_be_summed_over_microbatches(init: Init):
    init(microbatches=4)
    net = Chain(1)
    mean, total = (
        weft.DistributedModel(copy.deepcopy(net), average_grads_across_microbatches=average)
        for average in (True, False)
    )
    for model in (mean, total):
        train_step(model, *batch())
    for a, b in zip(mean.parameters(), total.parameters(), strict=True):
        assert torch.allclose(4 * a.grad, b.grad)


def test_uneven_microbatches_give_the_gradient_of_the_whole_batch(init: Init):
    init(microbatches=5)
    net = Chain(1)
    whole = copy.deepcopy(net)
    x, y = batch(13)
    expected = F.mse_loss(whole(x), y)
    expected.backward()

    @weft.step(allow_uneven=True)
    def uneven(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    model = weft.DistributedModel(net)
    assert uneven(model, x, y).reduce_mean().item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    with pytest.raises(SplitError, match=r"x has 13 samples, which 5 microbatches do not divide.*drop_last"):
        train_step(model, x, y)


def test_a_step_without_backward_is_an_evaluation(init: Init):
    init(microbatches=3)
    net = Chain().eval()
    model = weft.DistributedModel(net)

    @weft.step
    def evaluate(model: Any, x: Tensor) -> dict[str, Any]:
        out = model(x)
        return {"out": out, "rows": len(x), "nothing": None, "pair": (out.sum(), "text")}

    x, _ = batch()
    result = evaluate(model, x)
    assert torch.allclose(result["out"].concat(), net(x), atol=1e-6)
    assert len(result["out"].outputs) == 3 and result["out"].outputs[0].shape == (4, WIDTH)
    assert result["rows"] == [4, 4, 4] and result["nothing"] is None and result["pair"][1] == ["text"] * 3
    assert not result["out"].outputs[0].requires_grad
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        assert torch.equal(evaluate(model, x)["out"].concat(), result["out"].concat())


def test_outputs_keep_their_graph_if_asked(init: Init):
    init(microbatches=2)
    model = weft.DistributedModel(Chain(1))

    @weft.step(detach_outputs=False)
    def forward(model: Any, x: Tensor) -> Tensor:
        return model(x)

    forward(model, batch()[0]).reduce_mean().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_backward_takes_several_tensors_with_their_gradients(init: Init):
    init(microbatches=2)
    net = Chain(1)
    plain = copy.deepcopy(net)
    x, y = batch()

    @weft.step
    def two(model: Any, x: Tensor, y: Tensor) -> None:
        out = model(x)
        model.backward([out.sum(), out], [None, y])

    assert two(weft.DistributedModel(net), x, y) is None
    out = plain(x)
    torch.autograd.backward([out.sum() / 2, out], [None, y / 2])
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_a_step_may_be_a_class_attribute(init: Init):
    init(microbatches=2)

    class Trainer:
        train_step = train_step

    assert Trainer().train_step(weft.DistributedModel(Chain(1)), *batch()).reduce_mean() > 0
    assert Trainer.train_step.__name__ == "train_step"


def test_whole_inputs_and_other_dims(init: Init):
    init(microbatches=2)
    seen = []

    @weft.step(non_split_inputs=["table"], input_split_axes={"turned": 1})
    def look(x: Tensor, turned: Tensor, table: Tensor) -> None:
        seen.append((tuple(x.shape), tuple(turned.shape), tuple(table.shape)))

    look(torch.ones(4, 2), torch.ones(2, 4), table=torch.ones(3))
    assert seen == [((2, 2), (2, 2), (3,))] * 2


def test_states_and_parts_of_one_process_are_the_whole(init: Init):
    init()
    net = Normed()
    model = weft.DistributedModel(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert list(model.local_parameters()) == list(net.parameters())
    assert [name for name, _ in model.local_named_parameters()][0] == "module.norm.weight"
    assert [n for n, _ in model.local_named_parameters()] == [n for n, _ in model.named_parameters()]
    assert len(list(model.local_buffers())) == 4 and len(list(model.local_modules())) == 4
    local = model.local_state_dict()
    assert local.pop("_smp_is_partial") is False
    assert list(local) == [f"module.{name}" for name in net.state_dict()]
    assert str(weft.partition_report()) == "one partition: the whole model on every rank"
    assert weft.recorded_timeline().spans == ()
    assert (weft.rank(), weft.size(), weft.pp_size(), weft.dp_rank(), weft.get_mp_group()) == (
        0,
        1,
        1,
        0,
        [0],
    )
    assert weft.get_world_process_group() is None


def test_post_partition_hooks_run_once_before_the_first_forward(init: Init):
    init(microbatches=2)
    model = weft.DistributedModel(Chain(1))
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    heard: list[Any] = []
    model.register_post_partition_hook(lambda *given: heard.append((*given, model.module.blocks[0].calls)))
    model.register_post_partition_hook(lambda *given: heard.append("removed")).remove()
    model.module.blocks[0].calls = 0
    model.module.blocks[0].register_forward_hook(lambda block, *_: setattr(block, "calls", block.calls + 1))
    for _ in range(2):
        train_step(model, *batch())
    assert heard == [(model, optimizer, 0)]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_is_loaded_by_either_name(prefix: str, init: Init):
    init()
    source, net = Normed(), Normed()
    state = {prefix + name: value for name, value in source.state_dict().items()}
    weft.DistributedModel(net).load_state_dict(state)
    assert torch.equal(net.out.weight, source.out.weight)


def test_a_state_that_does_not_fit_is_one_error_and_loads_nothing(init: Init):
    init()
    net = Chain(1)
    model = weft.DistributedModel(net)
    before = copy.deepcopy(net.state_dict())
    state = {name: value + 1 for name, value in net.state_dict().items()}
    state["blocks.0.up.weight"] = torch.ones(2, 2)
    del state["blocks.0.down.bias"]
    state["more"] = torch.ones(1)
    with pytest.raises(UsageError) as caught:
        model.load_state_dict(state)
    assert str(caught.value) == (
        "the state does not fit the model: blocks.0.down.bias is missing; more is not part of the model; "
        "blocks.0.up.weight has the shape [2, 2], the model needs [16, 8]"
    )
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    del state["blocks.0.up.weight"]
    model.load_state_dict(state, strict=False)
    assert torch.equal(net.blocks[0].up.bias, before["blocks.0.up.bias"] + 1)


# --- used too early, or in the wrong place ---------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        weft.rank, weft.size, weft.pp_rank, weft.get_dp_group, weft.partition_report, weft.recorded_timeline,
        lambda: weft.DistributedModel(nn.Linear(1, 1)),
        lambda: weft.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        lambda: train_step(None, *batch()),
        lambda: weft.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0),
    ],
)  # fmt: skip
def test_before_init_everything_says_so(use: Callable[[], Any]):
    assert not weft.is_initialized() and not weft.is_tracing()
    with pytest.raises(UsageError, match=r"^weft is not initialised: call weft\.init\(\.\.\.\) first"):
        use()


def test_init_may_be_repeated_but_not_with_other_partitions(init: Init):
    init(microbatches=2)
    init(microbatches=3)
    assert weft.is_initialized()
    with pytest.raises(SplitError, match="which 3 microbatches do not divide"):
        train_step(weft.DistributedModel(Chain(1)), *batch(8))
    with pytest.raises(ConfigError, match="1 process cannot be divided into pipelines of 2 partitions"):
        init(partitions=2)


def test_a_shutdown_ends_the_session_and_init_begins_another(init: Init):
    init()
    weft.shutdown()
    assert not weft.is_initialized()
    weft.shutdown()
    init(microbatches=2)
    assert train_step(weft.DistributedModel(Chain(1)), *batch()).reduce_mean() > 0


def test_a_model_is_wrapped_once(init: Init):
    init()
    with pytest.raises(UsageError, match="the model is a DistributedModel already"):
        weft.DistributedModel(weft.DistributedModel(nn.Linear(1, 1)))


def test_a_step_cannot_call_another_step(init: Init):
    init(microbatches=2)
    model = weft.DistributedModel(Chain(1))

    @weft.step
    def outer(model: Any, x: Tensor, y: Tensor) -> Any:
        return train_step(model, x, y)

    with pytest.raises(UsageError, match="train_step: a step cannot call another step"):
        outer(model, *batch())
    train_step(model, *batch())


def test_backward_errors_say_what_to_give(init: Init):
    init()
    model = weft.DistributedModel(Chain(1))
    x, _ = batch()

    @weft.step
    def not_scalar(model: Any, x: Tensor) -> None:
        model.backward(model(x))

    @weft.step
    def no_gradient(model: Any, x: Tensor) -> None:
        model.backward(x.sum())

    with pytest.raises(UsageError, match=r"backward\(\) got a tensor of shape \[12, 8\]; give a scalar"):
        not_scalar(model, x)
    with pytest.raises(UsageError, match=r"backward\(\) got a tensor that needs no gradient"):
        no_gradient(model, x)
