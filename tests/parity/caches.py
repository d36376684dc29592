"""Steps of models that put keys and values into a cache, in parts over ranks; started by `test_caches.py`.

    caches.py --partitions 2 check...       with tensor_parallel_degree or context_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.training import step_of
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.context_parallel.apply import Region
from weft.torch.session import current
from weft.torch.tensor_parallel import is_cut
from weft.transport.channel import Message

CHECKS = Checks()
given = CHECKS.given
WIDTH = 12
ATTENTION = ("self_attn.", "cross_attn.", "attn.", "SelfAttention.", "EncDecAttention.")
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def microbatches(batch: dict[str, Tensor], count: int = 2) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, part, strict=True))
        for part in zip(*(tensor.chunk(count) for tensor in batch.values()), strict=True)
    ]


def trained(
    net: nn.Module, batches: list[dict[str, Tensor]], losses: list[Loss], optimizer_for: Any,
    checkpointed: Sequence[str] = (), **settings: Any,
) -> weft.DistributedModel:  # fmt: skip
    """Train split and in one process, a loss for each step: the losses, gradients and weights are the same.

    ``checkpointed``: modules that are computed again in the backward pass where the model is split.
    """
    gc.collect()
    weft.init({"partitions": given.partitions, "microbatches": 2, **settings})
    alone = copy.deepcopy(net)
    for name in checkpointed:
        set_activation_checkpointing(net.get_submodule(name))
    model = weft.DistributedModel(net)
    optimizer, plain = (
        weft.DistributedOptimizer(optimizer_for(model.parameters())),
        optimizer_for(alone.parameters()),
    )

    for batch, loss_of in zip(batches, losses, strict=True):
        step = step_of(loss_of)
        optimizer.zero_grad()
        plain.zero_grad()
        mine = step(model, batch).reduce_mean().item()
        found = [loss_of(alone, part) for part in microbatches(batch)]
        loss = sum(found) / 2
        loss.backward()
        assert mine == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9), rtol=1e-4, atol=1e-6,
        )  # fmt: skip
        optimizer.step()
        plain.step()
    torch.testing.assert_close(model.state_dict(), dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
    return model


def in_parts_of(model: weft.DistributedModel) -> bool:
    """Whether each attention layer that this rank has is in parts, if any is to be."""
    if model.plan.sequences is None and model.plan.tensors is None:
        return True
    if model.plan.sequences is not None:
        layers = [n for n, m in model.module.named_modules() if isinstance(vars(m).get("forward"), Region)]
        return bool(layers)
    mine = [
        parameter
        for name, parameter in model.local_named_parameters()
        if any(each in name for each in ATTENTION) and parameter.dim() == 2 and "relative" not in name
    ]
    return bool(mine) and all(map(is_cut, mine))


def case_of(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    case = CASES[name]
    net: Any = case.build()
    assert net.config.use_cache
    return net, [case.batch(number) for number in range(3)], case.optimizer_for


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


@CHECKS.of_each("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration")
def a_model_with_a_cache_trains_as_in_one_process(name: str) -> None:
    net, batches, optimizer_for = case_of(name)
    model = trained(net, batches, [plain_loss] * 3, optimizer_for)
    assert in_parts_of(model), name


def llama(**more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@CHECKS.check
def nothing_is_sent_for_a_cache_that_nobody_reads() -> None:
    """As many bytes as without one; and a rank holds its part of the weights."""
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    sent: list[int] = []
    for more in ({}, {"use_cache": False}):
        gc.collect()
        by_hand = {"auto_partition": False, "default_partition": 0}
        weft.init({"partitions": given.partitions, "microbatches": 2, **by_hand})
        net = llama(**more)
        for module in (*net.model.layers[4:], net.model.norm, net.lm_head):
            weft.set_partition(module, given.partitions - 1)
        total = sum(parameter.nbytes for parameter in net.parameters())
        model = weft.DistributedModel(net)
        step = step_of(plain_loss)
        step(model, {"input_ids": ids, "labels": ids})
        held = sum(parameter.nbytes for parameter in model.local_parameters())
        assert given.sequences or weft.tp_size() == 1 or held <= 0.55 * total / 2, held / total
        pipeline = current.session().pipeline
        assert pipeline is not None
        send, bytes_sent = pipeline.channel.send, []

        def count(peer: int, message: Message, send: Any = send, count: list[int] = bytes_sent) -> None:
            count.append(message.payload.nbytes if isinstance(message.payload, Tensor) else 0)
            send(peer, message)

        pipeline.channel.send = count  # type: ignore[method-assign]
        step(model, {"input_ids": ids, "labels": ids})
        pipeline.channel.send = send  # type: ignore[method-assign]
        sent.append(sum(bytes_sent))
    assert sent[0] == sent[1] > 0, sent


def reading_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Any = model(**batch)
    first, *_, last = out.past_key_values.layers
    found: Tensor = out.loss + 0.1 * first.keys.square().mean() + last.values.tanh().mean()
    return found


@CHECKS.check
def steps_may_read_the_cache() -> None:
    """Later steps too, where the first does not; what the first step reads is found out before weights are cut."""
    for losses in ([plain_loss, reading_loss, plain_loss], [reading_loss, plain_loss, reading_loss]):
        net, batches, optimizer_for = case_of("LlamaForCausalLM")
        model = trained(net, batches, losses, optimizer_for)
        assert in_parts_of(model) or losses[0] is reading_loss


@CHECKS.check
def caches_go_on_in_evaluation_steps() -> None:
    """A second call with the cache of the first, and the cache as a result."""
    net, batches, optimizer_for = case_of("LlamaForCausalLM")
    model = trained(net, batches[:1], [plain_loss], optimizer_for)
    alone: Any = case_of("LlamaForCausalLM")[0]
    alone.load_state_dict({name.removeprefix("module."): each for name, each in model.state_dict().items()})

    def go_on(model: Any, ids: Tensor) -> Any:
        out = model(input_ids=ids[:, :5])
        out = model(input_ids=ids[:, 5:7], past_key_values=out.past_key_values)
        out = model(input_ids=ids[:, 7:], past_key_values=out.past_key_values)
        return out.logits, out.past_key_values.layers[0].keys, out.past_key_values.layers[-1].values

    ids = batches[0]["input_ids"]
    with torch.no_grad():
        mine = weft.step(go_on)(model, ids)
        expected = go_on(alone, ids)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one.concat(), other, rtol=1e-4, atol=1e-5)


class Sharing(nn.Module):
    """A layer that leaves keys and values for others, or uses those of the first layer, or adds them to its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.reach = number, number > 1
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, store: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (each(x).view(samples, length, 3, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        store[self.number] = k, v
        if self.reach:
            k, v = k + store[0][0], store[0][1]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing(number) for number in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        store: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            x = layer(x, store)
        return self.head(x)


def distance(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - batch["x"].roll(1, 1)).square().mean()
    return found


def samples(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(number))}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def stack() -> Stack:
    torch.manual_seed(5)
    net = Stack()
    for number, layer in enumerate(net.layers):
        weft.set_partition(layer, number * given.partitions // 4)
    return net


@CHECKS.check
def layers_share_keys_over_partitions() -> None:
    weft.init({"partitions": given.partitions, "microbatches": 2})
    by_hand = {"auto_partition": False, "default_partition": given.partitions - 1}
    trained(stack(), [*map(samples, range(3))], [distance] * 3, adamw, **by_hand)


class Counted(list[Any]):
    """A list with an attribute of its own."""

    total = 0


class Filling(nn.Module):
    """A layer that fills a list, moves what another has put there, and returns the list among its results."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.late = number, False
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, store: Counted) -> dict[str, Any]:
        made = [self.own(x)]
        store.total += 1
        store.append({"made": made, "again": made})
        if self.number == 3:
            store.append([store[0]["made"].pop()])
        if self.late and self.number == 2:
            x = x + store[0]["made"][0]
        return {"x": x + made[0], "store": store, "made": made}


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Filling(number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        store = Counted()
        for layer in self.layers:
            found = layer(x, store)
            found["store"].append(x)
            found["made"].append(x)
            last: Any = store[-2]
            many = len(last["again"]) if isinstance(last, dict) else len(last)
            x = found["x"] * (1 + 0.01 * store.total * many * len(store))
        moved: Any = store[-2]
        return x + moved[0]


@CHECKS.check
def lists_are_filled_as_in_one_process() -> None:
    """Attributes too, what moves from one to another, lists in two places, and what is read later than in the first
    microbatch on the partition that has it."""
    weft.init({"partitions": given.partitions, "microbatches": 2})
    by_hand = {"auto_partition": False, "default_partition": given.partitions - 1}
    torch.manual_seed(5)
    net = Filled()
    for number, layer in enumerate(net.layers):
        weft.set_partition(layer, number % 2 * (given.partitions - 1))

    def later(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        for module in model.modules():
            if isinstance(module, Filling):
                module.late = True
        return distance(model, batch)

    trained(net, [*map(samples, range(2))], [distance, later], adamw, **by_hand)


class Reading(nn.Module):
    """Gets what it works on in a list, or in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, things: Any) -> Tensor:
        return torch.tanh(self.linear(things[0]))


class Recomputed(nn.Module):
    """Layers that get what the model's own code fills meanwhile."""

    def __init__(self, kind: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Reading() for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        things = self.kind([x])
        for layer in self.layers:
            x = x + layer(things)
            things[0] = x
        return x


@CHECKS.check
def lists_are_read_as_they_were_in_checkpoints() -> None:
    batches = [samples(number) for number in range(3)]
    for kind in (list, deque):
        torch.manual_seed(0)
        layers = [f"layers.{number}" for number in range(4)]
        trained(Recomputed(kind), batches, [distance] * 3, adamw, checkpointed=layers)


@CHECKS.of_each("sampled", "greedy")
def a_token_sends_as_much_after_few_as_after_many(how: str) -> None:
    """Keys and values stay on their ranks: what travels for a token does not grow with the cache."""
    weft.init({"partitions": given.partitions, "microbatches": 2})
    model = weft.DistributedModel(llama(bos_token_id=0, eos_token_id=1, pad_token_id=1).eval())

    @weft.step
    def generate(model: Any, ids: Tensor, mask: Tensor, length: int) -> Tensor:
        torch.manual_seed(3)
        found: Tensor = model.generate(
            ids, attention_mask=mask, min_new_tokens=length, max_new_tokens=length, do_sample=how == "sampled"
        )
        return found

    ids = torch.randint(2, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    generate(model, ids, torch.ones_like(ids), 3)
    pipeline = current.session().pipeline
    assert pipeline is not None
    send, each = pipeline.channel.send, list[int]()

    def count(peer: int, message: Message) -> None:
        if isinstance(message.payload, Tensor):
            each.append(message.payload.nbytes)
        send(peer, message)

    pipeline.channel.send = count  # type: ignore[method-assign]
    sent = []
    for length in (4, 8, 16, 20):
        each.clear()
        generate(model, ids, torch.ones_like(ids), length)
        sent.append(sum(each))
    pipeline.channel.send = send  # type: ignore[method-assign]
    assert sent[1] - sent[0] == sent[3] - sent[2] < 4 * 4 * 4096, (
        sent
    )  # those of one layer's keys take 4 KiB by then


class Bag:
    """Layers fill it: the output of the last one, and those of all."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: list[Tensor] = []
        self.parts: dict[int, Part] = {}


class Part:
    def __init__(self, value: Tensor) -> None:
        self.value, self.many = value, 1


class Bagging(nn.Module):
    """A layer that fills things of its own, and things that others fill too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.meddles, self.shares = number, False, True
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bag: Bag) -> Tensor:
        x = x + self.own(x).tanh()
        if self.number in bag.parts:
            part = bag.parts[self.number]
            part.value, part.many = torch.cat([part.value, x], 1), part.many + 1
        else:
            bag.parts[self.number] = Part(x)
        if self.meddles:
            bag.parts[0].value = x
        if self.shares:
            bag.last = x
            bag.all.append(x)
        return x + bag.parts[self.number].value.mean(1, keepdim=True)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Bagging(number) for number in range(4))

    def forward(self, x: Tensor, times: int = 4) -> Tensor:
        bag = Bag()
        for time in range(times):
            self.layers[3].meddles = time > 2 and getattr(self, "meddling", False)
            for layer in self.layers:
                x = layer(x, bag)
        total = sum(part.value.mean(1) * part.many for part in bag.parts.values())
        return x.mean(1) + total + sum(each.mean(1) for each in (bag.last, *bag.all) if each is not None)


def bags(shares: bool = True) -> tuple[Bags, Bags]:
    gc.collect()
    by_hand = {"auto_partition": False, "default_partition": given.partitions - 1}
    weft.init({"partitions": given.partitions, "microbatches": 2, **by_hand})
    torch.manual_seed(5)
    net = Bags()
    for layer in net.layers:
        layer.shares = shares
    alone = copy.deepcopy(net)
    for number, layer in enumerate(net.layers):
        weft.set_partition(layer, number % 2 * (given.partitions - 1))
    return net, alone


@CHECKS.check
def things_that_many_fill_are_those_of_one_process_without_gradients() -> None:
    """Each of several calls in a microbatch finds what it has left itself, and adds to what all fill."""
    for shares in (True, False):
        net, alone = bags(shares)
        model = weft.DistributedModel(net)
        step = weft.step(lambda model, x: model(x))
        for number in range(3):
            x = samples(number)["x"]
            with torch.no_grad():
                found, expected = step(model, x).concat(), alone(x)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@CHECKS.check
def a_part_that_another_layer_writes_later_is_refused() -> None:
    """The last check of a job."""
    net, _ = bags(shares=False)
    model = weft.DistributedModel(net)
    step = weft.step(lambda model, x: model(x))
    with torch.no_grad():
        step(model, samples(0)["x"])
        net.meddling = True  # type: ignore[assignment]
        step(model, samples(1)["x"])


@CHECKS.check
def keys_that_were_not_sent_are_refused() -> None:
    """The first step does not use them."""
    weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1})
    given.partitions = 2
    net = stack()
    for layer in net.layers:
        layer.reach = False
    model = weft.DistributedModel(net)
    step = step_of(distance)
    step(model, samples(0))
    for layer in net.layers:
        layer.reach = layer.number > 1
    step(model, samples(1))


if __name__ == "__main__":
    given.sequences = "context_parallel_degree" in os.environ.get("WEFT_SET", "")
    CHECKS.run(sys.argv[1:], lambda: None)
