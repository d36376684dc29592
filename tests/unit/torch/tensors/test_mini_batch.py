"""Cutting mini-batches: what is cut, what goes whole, and every error's text."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.errors import SplitError, UsageError
from weft.session.cut import Cut, argument_names
from weft.torch.tensors.mini_batch import MiniBatch, prepare, refuse_elsewhere, told_of_devices

X = torch.arange(24).reshape(8, 3)
Y = torch.arange(8)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Batch:
    ids: Any
    name: str = "kept"


@dataclass(slots=True)
class Slotted:
    ids: Any


class Graphs:
    """Cuts itself."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def smp_slice(self, count: int, microbatch: int, axis: int) -> list[int]:
        size = len(self.items) // count
        return [axis, *self.items[microbatch * size : (microbatch + 1) * size]]


def step(model: Any = None, x: Any = None, y: Any = None, *rest: Any, flag: Any = None) -> None:
    pass


def cut(*args: Any, microbatches: int = 4, how: Cut | None = None, **kwargs: Any) -> MiniBatch:
    return prepare(step, args, kwargs, how or Cut(), microbatches)


def faults(*args: Any, microbatches: int = 4, how: Cut | None = None, **kwargs: Any) -> str:
    with pytest.raises(SplitError) as caught:
        cut(*args, microbatches=microbatches, how=how, **kwargs)
    return str(caught.value)


def pieces(tree: Any, index: int = 1) -> Any:
    return cut(None, tree).slice(index)[0][1]


@pytest.mark.parametrize(
    ("tree", "get"),
    [
        (X, lambda t: t),
        ([1, X], lambda t: t[1]),
        ((X, None), lambda t: t[0]),
        ({"a": {"b": [X]}}, lambda t: t["a"]["b"][0]),
        (Pair(X, Y), lambda t: t.left),
        (Batch(X), lambda t: t.ids),
        (Slotted(X), lambda t: t.ids),
        (UserDict(a=X), lambda t: t["a"]),
        ([UserDict(a=X)], lambda t: t[0]["a"]),
        ({"in": UserDict(a=[X])}, lambda t: t["in"]["a"][0]),
        (Batch(Batch(Batch(Batch([{"x": X}])))), lambda t: t.ids.ids.ids.ids[0]["x"]),
        (Batch(UserDict(a=X)), lambda t: t.ids["a"]),
        ({X}, lambda t: next(iter(t))),
        (frozenset([X]), lambda t: next(iter(t))),
        ([{X}], lambda t: next(iter(t[0]))),
    ],
)
def test_tensors_are_cut_wherever_they_are(tree: Any, get: Any):
    part = pieces(tree)
    assert type(part) is type(tree)
    assert torch.equal(get(part), X[2:4])
    assert get(part).data_ptr() == X[2:4].data_ptr(), "a view"
    assert torch.equal(get(tree), X), "the caller's stays"


@pytest.mark.parametrize(
    "tree",
    [None, 3, "text", 0.5, nn.Parameter(torch.ones(5)), nn.Linear(2, 2), [], ["a"], {}, {1}, UserDict()],
)
def test_what_has_no_batch_goes_whole_as_the_same_object(tree: Any):
    assert cut(tree, X).slice(1)[0][0] is tree


def test_optimizers_and_parameters_inside_containers_go_whole():
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    part = cut(module, {"opt": optimizer, "p": module.weight, "x": X}).slice(0)[0][1]
    assert part["opt"] is optimizer and part["p"] is module.weight and part["x"].shape == (2, 3)


def test_an_object_may_cut_itself():
    part = cut(
        None, [Graphs(list(range(8))), X], {"g": Graphs([0, 1, 2, 3])}, Pair(Graphs([4, 5, 6, 7]), 1)
    ).slice(1)[0]
    assert part[1][0] == [0, 2, 3] and part[2] == {"g": [0, 1]} and part[3] == Pair([0, 5], 1)
    assert cut(None, Graphs(list(range(4))), how=Cut(axes={"x": 2})).slice(3)[0][1] == [2, 3]


def test_inputs_named_whole_are_not_cut():
    mask = torch.ones(3, 3)
    args, kwargs = cut(None, X, mask, how=Cut(whole=["y", "flag"]), flag=mask).slice(0)
    assert args[2] is mask and kwargs["flag"] is mask and args[1].shape == (2, 3)


def test_other_dims_may_be_cut():
    turned = X.t()
    part = cut(None, X, turned, how=Cut(axes={"y": 1})).slice(3)[0]
    assert torch.equal(part[1], part[2].t())
    part = cut(None, X, turned, how=Cut(axes={"y": -1})).slice(3)[0]
    assert torch.equal(part[1], part[2].t())


@given(st.integers(1, 40), st.integers(1, 40))
def test_uneven_parts_cover_the_batch_and_differ_by_one_at_most(size: int, microbatches: int):
    if size < microbatches:
        size, microbatches = microbatches, size
    batch = cut(None, torch.arange(size), microbatches=microbatches, how=Cut(uneven=True))
    parts = [batch.slice(index)[0][1] for index in range(microbatches)]
    assert torch.cat(parts).tolist() == list(range(size))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    weights = [batch.weight(index) for index in range(microbatches)]
    assert weights == [length / size for length in lengths] and sum(weights) == pytest.approx(1)


def test_without_tensors_all_microbatches_weigh_the_same():
    batch = cut(None, "nothing")
    assert batch.size is None and [batch.weight(index) for index in range(4)] == [0.25] * 4


def test_positions_have_names():
    def function(a: Any, /, b: Any, *c: Any, d: Any = 1) -> None: ...

    assert argument_names(function, (1, 2, 3, 4)) == ["a", "b", "c", "c"]
    assert argument_names(lambda: None, (1, 2)) == ["?", "?"]


# --- errors ----------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_divide_names_both_numbers_and_drop_last():
    assert cut(None, torch.ones(10, 2)).fault == (
        "x has 10 samples, which 4 microbatches do not divide: choose a batch size that is a multiple of 4; "
        "for the last batch of a data loader give it drop_last=True, or cut it as evenly as possible with "
        "@weft.step(allow_uneven=True)"
    )


def test_fewer_samples_than_microbatches_make_fewer_microbatches():
    batch = cut(None, torch.ones(3, 2), how=Cut(uneven=True))
    assert batch.microbatches == 3 and batch.weights() == [1 / 3] * 3 and not batch.fault
    assert "which 4 microbatches do not divide" in cut(None, torch.ones(3, 2)).fault


def test_no_samples():
    assert faults(None, torch.ones(0, 2)) == "x has no samples: leave the step out for an empty batch"


def test_different_sizes_list_all_tensors_and_both_ways_out():
    assert faults(None, {"ids": X, "mask": [Y]}, torch.ones(5, 5)) == (
        "the tensors given to the step do not have the same batch size: x['ids'] [8, 3], x['mask'][0] [8], "
        "y [5, 5]. One that has no batch dim goes whole to every microbatch with "
        '@weft.step(non_split_inputs=["y"]); one that has it elsewhere is cut along another dim '
        'with @weft.step(input_split_axes={"y": 1})'
    )


@pytest.mark.parametrize(("how", "dim"), [(None, 0), (Cut(axes={"y": 1}), 1), (Cut(axes={"y": -2}), -2)])
def test_a_tensor_without_the_dim_says_how_to_pass_it_whole(how: Cut | None, dim: int):
    tensor = torch.ones(()) if dim == 0 else Y
    assert faults(None, X, tensor, how=how) == (
        f"y has the shape {list(tensor.shape)} and so no dim {dim} to cut: if every microbatch "
        'needs it whole, write @weft.step(non_split_inputs=["y"])'
    )


def test_the_path_of_a_tensor_inside_is_told():
    assert faults(None, Batch([torch.ones(())])).startswith("x.ids[0] has the shape [] ")
    assert faults(None, UserDict(a=torch.ones(()))).startswith("x['a'] has the shape [] ")


def test_names_that_the_step_does_not_have_are_told():
    assert (
        faults(None, X, how=Cut(whole=["z"], axes={"w": 1}))
        == "step has no argument z, w, which weft.step names"
    )

    def open_step(**batch: Tensor) -> None: ...

    assert prepare(open_step, (), {"ids": X}, Cut(whole=["mask"]), 4).size == 8


def test_all_faults_are_told_at_once():
    text = faults(None, X, torch.ones(()), how=Cut(whole=["z"]), flag=torch.ones(5))
    assert len(text.splitlines()) == 3, text


def test_tensors_of_different_sizes_make_one_microbatch_under_a_trainer():
    def step(batch, scale): ...

    given = {"pairs": torch.zeros(8, 3), "pair": torch.ones(4)}
    with pytest.raises(SplitError, match="do not have the same batch size"):
        prepare(step, (given, 2.0), {}, Cut(), 2)
    batch = prepare(step, (given, 2.0), {}, Cut(adapts=True), 2)
    assert batch.microbatches == 1 and batch.weight(0) == 1.0 and batch.slice(0)[0] == (given, 2.0)
    assert "batch['pairs'] [8, 3], batch['pair'] [4]), so the batch is one microbatch" in batch.notice


def test_tensors_on_another_device_are_named_with_what_to_write():
    batch = prepare(step, (None, {"a": X, "b": X.to("meta")}), {}, Cut(), 2)
    with pytest.raises(
        UsageError, match=r"^x\['b'\] is on the device meta, where .* have no data, .* computes on cpu"
    ):
        refuse_elsewhere(batch, torch.device("cpu"))
    batch = prepare(step, (None, [X, X]), {}, Cut(), 2)
    refuse_elsewhere(batch, torch.device("cuda:0"))
    error = RuntimeError("Expected all tensors to be on the same device, but got cuda:0 and cpu")
    notice = told_of_devices(error, batch, torch.device("cuda:0"))
    assert notice.startswith("x[0], x[1] are on the cpu, and this rank computes on cuda:0, where weft brings")
    assert notice.endswith('write x[1] = x[1].to("cuda") before the step')
    assert not told_of_devices(error, batch, torch.device("cpu"))
    assert not told_of_devices(RuntimeError("shapes differ"), batch, torch.device("cuda:0"))
