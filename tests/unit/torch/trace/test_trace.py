"""The tracing run: what it finds out, and that it leaves nothing behind."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import models
from tests.unit.torch.networks import CPU, WIDTH, Block, Chain, Leaking, Normed, Tied, linears, traced
from weft.torch.backward.weight_gradients import take_weights
from weft.torch.execution.thread_settings import rehearsal
from weft.torch.pytorch.private import SLOT
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams, same_states
from weft.torch.trace.dry_run import ParameterWrites, Snapshot
from weft.torch.trace.saved_memory import SavedMemory
from weft.torch.trace.trace import trace


def test_every_called_module_has_times_bytes_and_a_place_in_the_order():
    net = Chain(2)
    found = traced(net)
    assert [record for record in found.records if found.records[record].calls] == [
        "", "blocks.0", "blocks.0.up", "blocks.0.down", "blocks.1", "blocks.1.up", "blocks.1.down",
    ]  # fmt: skip
    for name in ("blocks.0.up", "blocks.1.down", "blocks.0", ""):
        record = found.records[name]
        assert record.forward_s > 0 and record.module is net.get_submodule(name)
        assert record.describable and record.calls == 1, "each pass counts anew"
    for name in ("blocks.0.up", "blocks.1.down"):
        assert found.records[name].backward_s > 0
    assert found.records["blocks.0.up"].output_bytes == 4 * 2 * WIDTH * 4
    assert found.records["blocks.0"].output_bytes == 4 * WIDTH * 4
    assert found.records["blocks.0"].saved_bytes >= 4 * 2 * WIDTH * 4, "what tanh keeps"
    orders = [record.order for record in found.records.values()]
    assert orders == sorted(orders) and found.seconds > 0


def test_times_are_a_modules_own():
    clock = SimpleNamespace(seconds=0.0)

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.seconds += 1.0
            return super().forward(x)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.seconds += 2.0
            result = self.inner(x)
            clock.seconds += 4.0
            return result

    net = nn.Sequential(Slow())
    found = trace(net, lambda: net(torch.randn(2, WIDTH)), CPU, Snapshot([net], Streams(CPU)), clock=clock)  # type: ignore[arg-type]
    assert {name: record.forward_s for name, record in found.records.items()} == {
        "": 0.0,
        "0": 6.0,
        "0.inner": 1.0,
    }


def backward_times(net: nn.Module, clock: SimpleNamespace) -> dict[str, float]:
    """Those of a trace on the clock, by module."""

    def run() -> None:
        rehearsal().backward([net(torch.randn(2, WIDTH)).sum()], [torch.ones(())])  # type: ignore[union-attr]

    found = trace(net, run, CPU, Snapshot([net], Streams(CPU)), clock=clock)  # type: ignore[arg-type]
    return {name: record.backward_s for name, record in found.records.items() if record.backward_s}


def test_parts_of_a_modules_own_code_stand_behind_the_module_called_before_them():
    """A model that computes its loss does so after its last module, with what autograd keeps for it."""
    clock = SimpleNamespace(seconds=0.0)

    class Slowly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds):
            clock.seconds += seconds
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            clock.seconds += 2 * ctx.seconds
            return grad, None

    def scored(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.body(Slowly.apply(x, 1.0))
        return torch.logsumexp(net.head(Slowly.apply(x, 2.0)), 0).sum() * Slowly.apply(x, 5.0).sum()

    net = models.Composed(scored, **linears(["body", "head"]))
    x = torch.randn(4, WIDTH, requires_grad=True)

    def step() -> None:
        rehearsal().backward(net(x))

    found = trace(net, step, CPU, Snapshot([net], Streams(CPU)), clock=clock)
    order = {name: found.records[name].order for name in ("", "body", "head")}
    parts = dict(found.records[""].spread())
    assert list(parts) == [order[""], order["body"], order["head"]]
    assert [part.forward_s for part in parts.values()] == pytest.approx([1.0, 2.0, 5.0])
    assert [part.backward_s for part in parts.values()] == pytest.approx([2.0, 4.0, 10.0])
    kept = [part.saved_bytes for part in parts.values()]
    assert kept[:2] == [0, 0] and kept[2] == found.records[""].saved_bytes > 0
    assert [part.largest_bytes > 0 for part in parts.values()] == [False, False, True]


@pytest.mark.parametrize("returned", [False, True])
def test_logits_that_a_step_computes_in_chunks_take_no_memory_unless_it_returns_them(returned: bool):
    words, rows = 50, 6

    net = models.Stack(body=nn.Linear(WIDTH, WIDTH), between=nn.Tanh(), head=nn.Linear(WIDTH, words))
    x, labels = torch.randn(rows, WIDTH), torch.arange(rows)

    def step() -> Any:
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, labels)
        rehearsal().backward(loss)
        return logits if returned else loss

    whole, chunked = (
        trace(net, step, CPU, Snapshot([net], Streams(CPU)), chunked_loss=how) for how in ("off", "on")
    )
    logits = 4 * rows * words
    assert whole.around.saved_bytes - chunked.around.saved_bytes == (0 if returned else logits)
    assert whole.around.largest_bytes == logits
    assert chunked.around.largest_bytes == (logits if returned else 8 * rows)
    for name in ("", "body", "head"):
        assert whole.records[name].saved_bytes == chunked.records[name].saved_bytes


def test_what_autograd_does_before_an_operation_counts_for_it():
    clock = SimpleNamespace(seconds=0.0)

    def pass_time(grad: torch.Tensor) -> None:
        clock.seconds += 3.0

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            result.register_hook(pass_time)
            return result

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert backward_times(net, clock) == {"1": 3.0}


def test_what_the_trace_does_before_the_backward_pass_counts_for_no_module(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(seconds=0.0)

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.seconds += 5.0
        return take_weights(*args, **kwargs)

    monkeypatch.setattr("weft.torch.trace.tracer.take_weights", slow)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def run() -> None:
        rehearsal().backward([net(torch.randn(2, WIDTH)).sum()], [torch.ones(())])  # type: ignore[union-attr]

    found = trace(net, run, CPU, Snapshot([net], Streams(CPU)), clock=clock)  # type: ignore[arg-type]
    assert [record.backward_s for record in (*found.records.values(), found.around)] == [0.0] * 4


def test_a_backward_pass_inside_of_a_forward_pass_takes_its_own_time_only():
    clock = SimpleNamespace(seconds=1e6)

    class Learns(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.seconds += 2.0
            with torch.enable_grad():
                torch.autograd.backward(super().forward(x.detach()).sum())
            return super().forward(x)

    assert backward_times(nn.Sequential(Learns(WIDTH, WIDTH)), clock) == {}


def test_an_evaluation_step_guesses_the_backward_time():
    found = traced(Chain(1), backward=False)
    for record in found.records.values():
        assert record.backward_s == pytest.approx(2 * record.forward_s)


def test_activations_count_each_memory_once_and_parameters_not():
    def twice(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x @ net.weight.t())  # keeps its result
        return y * y  # keeps it again

    found = traced(models.Composed(twice, weight=nn.Parameter(torch.ones(100, WIDTH))))
    assert found.records[""].saved_bytes < 4 * (4 * 100 + 4 * WIDTH) * 1.5


def test_views_of_one_memory_keep_each_their_piece_and_together_no_more_than_all_of_it():
    memory, weight = SavedMemory([]), torch.ones(6)
    three = torch.randn(3, 100)
    assert [memory.add(part) for part in three] == [400, 400, 400]
    assert memory.add(three[1]) == memory.add(three) == 0, "all of it is counted"
    assert memory.add(torch.ones(1).expand(1000)) == 4, "what is expanded is there once"
    assert SavedMemory([weight]).add(weight[2:]) == 0


def test_modules_that_were_not_called_stand_where_they_are_registered():
    class Skips(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[2](self.blocks[0](x))

    found = traced(Skips(3))
    record = found.records["blocks.1"]
    assert record.calls == 0 and record.forward_s == record.backward_s == 0
    names = list(found.records)
    assert names.index("blocks.0.down") < names.index("blocks.1") < names.index("blocks.2")
    assert "blocks" not in found.records, "a list cannot be called"


def test_a_tensor_that_gets_out_by_an_attribute_is_noticed():
    assert traced(Leaking()).leaking >= {"writer"}
    assert "block" not in traced(Leaking()).leaking
    assert not traced(Chain()).leaking & set(traced(Chain()).records)


class Fills(nn.Module):
    """Layers that fill a store, one of which uses what another one has left."""

    def __init__(self, store: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self.layer, layer, number)
        self.store = store

    @staticmethod
    def layer(layer: Any, number: int, x: torch.Tensor, store: Any) -> torch.Tensor:
        store.append(nn.functional.linear(x, layer.weight))
        return x + store[-1] + (store[0] if number == 2 else 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        store = [] if self.store is None else self.store
        for layer in self.layers:
            x = layer(x, store)
        return x


def test_what_modules_put_into_a_list_is_a_result_and_who_uses_it_is_noticed():
    found = traced(Fills())
    assert not found.leaking & found.records.keys() and found.readers == {"layers.2"}


def test_what_modules_put_where_other_microbatches_find_it_leaks():
    net = Fills([])
    found = trace(net, lambda: net(torch.randn(2, WIDTH)), CPU, Snapshot([net], Streams(CPU)))
    assert found.leaking >= {"layers.0", "layers.1", "layers.2"} and net.store == []


def test_who_uses_whose_parameters_is_noticed():
    net = models.Composed(
        lambda net, x: net.block(net.embed(x)) @ net.embed.weight * net.scale,
        **linears(["embed"]), scale=nn.Parameter(torch.ones(())), block=Block(),
    )  # fmt: skip
    found = traced(net)
    assert set(found.records[""].parameters_used) == {id(net.embed.weight), id(net.scale)}
    assert found.records[""].operations >= 2 and found.records[""].called == {"embed", "block"}


def test_only_operations_count_and_not_what_the_trace_itself_looks_at():
    class Sums(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.blocks:
                x = x + part(x.reshape(x.shape))
            return x

    assert traced(Sums(3)).records[""].operations == 6


def test_weight_gradients_count_where_the_parameter_is_held_though_that_module_is_never_called():
    net = models.Composed(
        lambda net, x: nn.functional.linear(net.block(x), net.held.weight),
        block=Block(), **linears(["held", "idle"]),
    )  # fmt: skip
    found = traced(net, split=True)
    assert found.records["idle"].weight_s == 0.0
    assert found.records["held"].calls == 0 and found.records["held"].weight_s > 0.0
    assert found.records[""].input_s > 0.0


def test_a_result_that_cannot_be_described_is_noticed():
    odd = models.Composed(lambda net, x: {net.inner(x)}, **linears(["inner"]))
    found = traced(models.Composed(lambda net, x: next(iter(net.odd(x))), odd=odd))
    assert not found.records["odd"].describable and found.records["odd.inner"].describable


# --- nothing is left behind -----------------------------------------------------------------------------


def test_buffers_gradients_attributes_and_random_states_stay():
    net = Normed()
    net.out.weight.grad = before = torch.ones(WIDTH, WIDTH)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    streams = Streams(CPU)
    states = streams.capture(TORCH | PYTHON | NUMPY)
    x = torch.ones(4, WIDTH)

    def run() -> None:
        random.random()
        loss = net(x).sum()
        assert rehearsal() is not None
        rehearsal().backward([loss], [torch.ones_like(loss)])

    found = trace(net, run, CPU, Snapshot([net], streams))
    assert same_states(states, streams.capture(TORCH | PYTHON | NUMPY))
    assert net.out.weight.grad is before and torch.equal(before, torch.ones(WIDTH, WIDTH))
    assert net.out.bias.grad is None and net.norm.weight.grad is None
    for name, buffer in net.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1]), name
    assert net.calls == 0
    assert not any(SLOT in module.__dict__ for module in net.modules())
    assert rehearsal() is None
    assert found.written_buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_an_error_in_the_step_leaves_nothing_behind_either():
    net = Normed()
    mean = net.norm.running_mean.clone()

    def run() -> None:
        net(torch.ones(4, WIDTH))
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        trace(net, run, CPU, Snapshot([net], Streams(CPU)))
    assert torch.equal(net.norm.running_mean, mean) and rehearsal() is None
    assert not any(SLOT in module.__dict__ for module in net.modules())


def test_draws_from_numpy_are_noticed():
    import numpy

    class Draws(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * numpy.random.rand()

    assert traced(Draws(1)).numpy and not traced(Chain(1)).numpy


class Reads(nn.Module):
    """Uses a buffer, which another module writes after that where ``writes``."""

    def __init__(self, mean: torch.Tensor, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), writes
        self.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x - self.mean)
        if self.writes:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


def test_another_trace_knows_nothing_of_the_first_one():
    mean = torch.zeros(WIDTH)
    net = nn.Sequential(Reads(mean, False), Reads(mean, True))
    assert [traced(net).leaking for _ in range(2)] == [set(), set()]


def test_the_same_trace_again():
    one, other = traced(Tied()), traced(Tied())
    assert list(one.records) == list(other.records)


def test_only_parameters_that_are_written_are_copied_and_come_back():
    net = nn.Linear(2, 2)
    weight, bias = net.weight.detach().clone(), net.bias.detach().clone()
    writes = ParameterWrites(net.parameters())
    with writes:
        net.weight.grad = torch.ones(2, 2)
        net.zero_grad()
        net.weight.requires_grad_()
        net(torch.ones(1, 2)).relu_()
    assert not writes._kept
    with writes:
        with torch.no_grad():
            net.weight.mul_(2)[0] = 1
        net.bias.data.add_(1)
    writes.undo()
    assert torch.equal(net.weight, weight) and torch.equal(net.bias, bias)


def test_the_largest_tensor_that_is_kept_is_told():
    """Its gradients are there for a moment in the backward pass; see `unit_tree.GRADIENTS`."""
    found = traced(nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.ReLU(), nn.Linear(64 * WIDTH, WIDTH)))
    assert max(record.largest_bytes for record in found.records.values()) == 4 * 64 * WIDTH * 4


def test_what_an_activation_checkpoint_computes_again_counts_for_its_last_module():
    class Checkpointed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    plain, again = traced(Chain(2)).records, traced(Checkpointed(2)).records
    for number in range(2):
        assert not any(record.recomputed_bytes for record in plain.values())
        kept = sum(plain[f"blocks.{number}{inner}"].saved_bytes for inner in ("", ".up", ".down"))
        found = sum(again[f"blocks.{number}{inner}"].recomputed_bytes for inner in ("", ".up", ".down"))
        assert kept / 2 < found <= 2 * kept, (
            "its results, where the plain one keeps what goes in and comes out"
        )
