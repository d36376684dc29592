"""Whole weights of a split model, as an inference engine takes them; started by `test_streamed.py`.

    streamed.py --partitions 2 check...       with more settings in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.training import made_late, squares, step_of
from weft.errors import DivergenceError, UsageError
from weft.torch.tensors.pytree import bytes_of

CHECKS = Checks()
given = CHECKS.given
SMALL = 3000
"""Bytes of a bucket that has a few of the weights."""


class Engine:
    """Loads weights as vLLM's models do: from names and full tensors, each of which is copied and let go of."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.tied = net, {name: name for name in net.state_dict()}
        first: dict[int, str] = {}
        for name, tensor in net.state_dict(keep_vars=True).items():
            self.tied[name] = first.setdefault(id(tensor), name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = self.net.state_dict(), set()
        for name, tensor in weights:
            assert type(tensor) is Tensor and tensor.is_contiguous() and not tensor.requires_grad
            own[name].copy_(tensor)
            loaded.add(self.tied[name])
        return loaded


class OtherEngine:
    """Takes a list of names and full tensors, as SGLang does, of so many bytes at most, and keeps them."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        self.held.update(named_tensors)


def is_first() -> bool:
    return weft.pp_rank() == weft.tp_rank() == 0


def same(found: Any, expected: Any, only: bool = True) -> None:
    """Names and bits are those expected; ``only``: on the first rank of a replica, and nothing elsewhere."""
    found, expected = dict(found), dict(expected) if is_first() or not only else {}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def once(net: nn.Module) -> dict[str, Tensor]:
    """The state of a model, each tensor with its first name."""
    tensors = net.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensors[name].detach() for name in tensors if first[id(tensors[name])] == name}


def start() -> None:
    gc.collect()
    weft.init({"partitions": given.partitions, "microbatches": 2})


def split(net: nn.Module, loss_of: Any, batch: Sequence[Any]) -> tuple[nn.Module, weft.DistributedModel, Any]:
    """A model in one process, and split, with the same weights; what trains the split one."""
    start()
    plain = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = step_of(loss_of)

    def train(rate: float = 0.1) -> None:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        step(model, *batch)
        optimizer.step()

    train(0.0)  # splits it
    return plain, model, train


def zoo(name: str) -> tuple[Any, list[Any]]:
    case = CASES[name]
    return case.build(), [case.batch(0)]


def loss_of_batch(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@CHECKS.of_each(
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "BertForMaskedLM",
    "MixtralForCausalLM",
    "LlamaForCausalLM",
)
def weights_are_those_of_one_process(name: str) -> None:
    net, batch = zoo(name)
    plain, model, train = split(net, loss_of_batch, batch)
    for bucket_bytes in (1, SMALL, 1 << 30):
        same(weft.stream_weights(model, bucket_bytes), once(plain))
    same(weft.stream_weights(model, tied_names=True), plain.state_dict())
    train()
    state = model.state_dict()
    wanted = {name: state[name] for name in once(plain)}
    same(weft.stream_weights(model, SMALL, every_rank=True), wanted, only=False)
    half = {n: v.bfloat16() if v.is_floating_point() else v for n, v in wanted.items()}
    same(weft.stream_weights(model, SMALL, dtype=torch.bfloat16), half)
    assert any(not torch.equal(value, plain.state_dict()[name]) for name, value in wanted.items())


@CHECKS.check
def names_are_those_in_files_of_transformers() -> None:
    from safetensors import safe_open

    for name in ("GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM"):
        net, batch = zoo(name)
        plain, model, _ = split(net, loss_of_batch, batch)
        found = {name for name, _ in weft.stream_weights(model)}
        if weft.rank() == 0:
            plain.save_pretrained(given.folder / name)  # type: ignore[operator]
            with safe_open(given.folder / name / "model.safetensors", "pt") as file:
                assert found == {*file.keys()}, found ^ {*file.keys()}
        weft.barrier()


@CHECKS.check
def engines_compute_what_the_model_does() -> None:
    net, batch = zoo("GPT2LMHeadModel")
    plain, model, train = split(net, loss_of_batch, batch)
    engine, other = Engine(copy.deepcopy(plain)), OtherEngine()
    for _ in range(2):
        train()
        loaded = engine.load_weights(weft.stream_weights(model, SMALL))
        kept: list[tuple[str, Tensor]] = []
        for named in weft.stream_weights(model, SMALL):
            kept.append(named)
            if len(kept) == 5:
                other.update_weights_from_tensor(named_tensors=kept)
                kept = []
        other.update_weights_from_tensor(named_tensors=kept)
        state = model.state_dict()
        if is_first():
            assert loaded == {*once(plain)}
            for name, value in engine.net.state_dict().items():
                assert torch.equal(value, state[name]), name
            assert all(torch.equal(value, state[name]) for name, value in other.held.items())
    before = {name: value.clone() for name, value in other.held.items()}
    train()  # what an engine keeps stays as it was
    assert all(torch.equal(value, before[name]) for name, value in other.held.items())


def with_adapter(**more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    net, batch = zoo("LlamaForCausalLM")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **more)
    return get_peft_model(net, config), batch


@CHECKS.check
def adapters_are_merged_as_peft_does() -> None:
    for more in ({}, {"modules_to_save": ["lm_head"]}):
        net, batch = with_adapter(**more)
        plain, model, train = split(net, loss_of_batch, batch)
        for _ in range(2):
            state = model.state_dict()
            same(weft.stream_weights(model, SMALL, merge_adapters=False), state)
            plain.load_state_dict(state)
            whole = copy.deepcopy(plain).merge_and_unload().state_dict()  # type: ignore[operator]
            same(weft.stream_weights(model, SMALL), whole)
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
            train()


@CHECKS.check
def adapters_that_are_no_sum_are_refused() -> None:
    net, batch = with_adapter(use_dora=True)
    plain, model, _ = split(net, loss_of_batch, batch)
    with pytest.raises(
        UsageError, match=r"not a plain sum of a weight and two factors.*merge_adapters=False"
    ):
        weft.stream_weights(model)
    same(weft.stream_weights(model, merge_adapters=False), plain.state_dict())


@CHECKS.check
def parameters_that_are_made_late_come_whole() -> None:
    start()
    net, alone = made_late(lambda: models.Words(64, 512, [models.Block(512, 512) for _ in range(4)]))
    assert any(parameter.is_meta for parameter in net.parameters())
    model = weft.DistributedModel(net)
    step = step_of(lambda model, words: squares(model, words))
    step(model, torch.randint(64, (4, 3)))
    same(weft.stream_weights(model), once(alone))


def live_bytes(but: set[int]) -> int:
    """The memory of all tensors of this process, but for some."""
    gc.collect()
    found = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor) and not each.is_meta
    }
    return sum(size for place, size in found.items() if place not in but)


@CHECKS.check
def a_rank_holds_two_buckets_at_most() -> None:
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
    _, model, _ = split(net, squares, [torch.randn(4, 128)])
    own = {
        each.untyped_storage().data_ptr()
        for each in gc.get_objects()
        if isinstance(each, Tensor) and not each.is_meta
    }
    size = 128 * 128 * 4
    whole = 0
    for _, tensor in weft.stream_weights(model, 2 * size):
        whole += bytes_of(tensor)
        found = live_bytes(own)
        assert found <= 2 * 2 * size + 4096, found / size
    assert whole == (12 * size if is_first() else 0)


@CHECKS.check
def calls_in_other_places_are_refused() -> None:
    start()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for wrong, words in (
        ({"bucket_bytes": 0}, "bucket_bytes is 0"), ({"bucket_bytes": 1.5}, "bucket_bytes is 1.5"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            weft.stream_weights(weft.DistributedModel(copy.deepcopy(net)), **wrong)
    with pytest.raises(UsageError, match="model is a Sequential: pass the DistributedModel"):
        weft.stream_weights(net)  # type: ignore[arg-type]
    start()
    model = weft.DistributedModel(net)
    if given.partitions > 1:
        with pytest.raises(UsageError, match=r"stream_weights\(\) is known only after the partition"):
            weft.stream_weights(model)
    seen = []

    @weft.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = squares(model, x)
        try:
            weft.stream_weights(model)
        except UsageError as error:
            seen.append(str(error))
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 4))
    if given.partitions > 1:
        assert any("stream_weights() was called inside a weft.step function" in each for each in seen), seen


@CHECKS.check
def ranks_that_stop_together_go_on() -> None:
    net, batch = zoo("GPT2LMHeadModel")
    plain, model, _ = split(net, loss_of_batch, batch)
    for name, _ in weft.stream_weights(model, 1, every_rank=True):
        if name != next(iter(once(plain))):
            break
    same(weft.stream_weights(model), once(plain))


@CHECKS.check
def other_arguments_are_told() -> None:
    """The last check of a job."""
    net, batch = zoo("GPT2LMHeadModel")
    _, model, _ = split(net, loss_of_batch, batch)
    with pytest.raises(
        DivergenceError, match=r"other arguments, or do other things.*rank 0: \[1000, .*rank 1: \[1001"
    ):
        next(weft.stream_weights(model, 1000 + weft.rank()), None)


@CHECKS.check
def a_rank_that_stops_early_is_named() -> None:
    """The last check of a job."""
    net, batch = zoo("GPT2LMHeadModel")
    _, model, _ = split(net, loss_of_batch, batch)
    stream = weft.stream_weights(model, 1)
    if weft.rank() == 0:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        return
    with pytest.raises(
        UsageError, match=r"rank 0 ended its loop over stream_weights\(\) before the last weight"
    ):
        list(stream)


@CHECKS.check
def a_rank_that_does_not_come_is_named() -> None:
    """The last check of a job, which fails."""
    net, batch = zoo("GPT2LMHeadModel")
    _, model, train = split(net, loss_of_batch, batch)
    if weft.rank() == 0:
        list(weft.stream_weights(model))
    else:
        train()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], start)
