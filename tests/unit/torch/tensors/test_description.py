"""Structures that a rank describes are built again, the same, by another rank."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import UsageError
from weft.torch.tensors.description import Describer, build, find_class
from weft.torch.tensors.pytree import map_tensors, opaque_objects

from .test_pytree import ONE, TWO, Cache, Carried, Frozen, Output, Pair, Slotted


def empty(description: list[Any]) -> Tensor:
    dtype, shape, strides, requires_grad = description
    made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
    return made.requires_grad_(requires_grad)


def again(tree: Any, inputs: Any = ()) -> Any:
    """`tree` as another rank builds it from the text that it is told."""
    return build(json.loads(json.dumps(Describer(inputs).describe(tree))), [], empty, inputs)


def shape_of(tree: Any) -> Any:
    """`tree` with each tensor turned into what must be the same on both sides."""
    return map_tensors(
        tree, lambda t: (str(t.dtype), tuple(t.shape), t.stride(), t.requires_grad), attributes=True
    )


TENSORS = st.builds(
    lambda shape, dtype, grad: torch.zeros(
        shape, dtype=dtype, requires_grad=grad and dtype.is_floating_point
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(),
)
LEAVES = st.one_of(
    TENSORS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers())), inner, max_size=3
        ),
        st.builds(Pair, inner, inner),
        st.builds(Carried, inner, inner),
        st.builds(Slotted, inner, inner),
        st.builds(Output, inner.filter(lambda x: x is not None), inner),
        st.lists(st.integers(0, 4), max_size=3).map(torch.Size),
    ),
    max_leaves=8,
)


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_another_rank_builds_the_same_structure(tree: Any):
    built = again(tree)
    assert type(built) is type(tree)
    assert repr(shape_of(built)) == repr(shape_of(tree))


def test_dataclasses_may_lie_deep_in_each_other():
    tree = Carried(ONE)
    for _ in range(10):
        tree = Carried(None, tree)
    assert repr(shape_of(again(tree))) == repr(shape_of(tree)) and "tensor" not in repr(shape_of(tree))


@pytest.mark.parametrize(
    "tree",
    [
        torch.max(torch.ones(2, 2), 0),
        OrderedDict(a=ONE),
        Frozen(ONE),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2]),
    ],
    ids=lambda tree: type(tree).__qualname__,
)
def test_other_kinds_are_built_again(tree: Any):
    built = again(tree)
    assert type(built) is type(tree) and repr(shape_of(built)) == repr(shape_of(tree))


def test_a_tensor_that_appears_twice_is_one_tensor():
    built = again({"a": ONE, "b": [ONE, TWO]})
    assert built["a"] is built["b"][0] and built["b"][1] is not built["a"]


def test_strides_and_the_need_of_a_gradient_travel():
    built = again(torch.ones(2, 3, requires_grad=True).t())
    assert built.stride() == (1, 3) and built.requires_grad


def test_an_object_that_came_in_is_the_same_object_going_out():
    cache, other = Cache(ONE), object()
    built = again([ONE, cache, other], inputs=((TWO, cache), {"other": other}))
    assert built[1] is cache and built[2] is other
    assert opaque_objects(((TWO, cache), {"other": other}))[0] is cache


def test_an_unknown_object_is_an_error_that_says_what_may_be_returned():
    with pytest.raises(
        UsageError, match=r"returns a Cache, which cannot be described .*set_partition\(parent, index\)"
    ):
        again(Cache(ONE))
    with pytest.raises(UsageError, match="returns a set, which cannot be described"):
        again({1, 2})


def test_a_class_that_this_rank_does_not_know_is_an_error():
    local = namedtuple("local", "a")
    with pytest.raises(
        UsageError,
        match=r"returned a local of tests\.unit\.torch\.tensors\.test_description, which this rank",
    ):
        again(local(ONE))
    with pytest.raises(UsageError, match="returned a Gone of nowhere"):
        find_class("nowhere:Gone", (object,))
    with pytest.raises(UsageError, match="define it at the top level of a module"):
        find_class("json:JSONDecoder", (dict,))
