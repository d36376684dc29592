"""Nested structures: what is replaced, what stays the same object, what another rank builds again."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.tensors.description import Describer, build, find_class
from weft.torch.tensors.nested import opaque_objects, replace


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Carried:
    hidden: Any
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    hidden: Any


@dataclass(slots=True)
class Slotted:
    hidden: Any
    extra: Any = None


@dataclass
class Output(OrderedDict):
    """As the outputs of `transformers`: a dict whose keys are its fields, without those that are None."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Cache:
    """Any object that models pass along, with tensors inside."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers = [tensor]
        self.deeper = SimpleNamespace(inner=SimpleNamespace(tensor=tensor))
        self.module = nn.Linear(1, 1)


ONE, TWO = torch.ones(2), torch.zeros(3)


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    "tree",
    [
        ONE, None, 1, "text", [ONE, (TWO, None)], {"a": ONE, 3: [TWO]}, Pair(ONE, 1), Carried(ONE),
        Frozen(ONE), Slotted(ONE), Output(loss=ONE), torch.max(torch.ones(2, 2), 0), OrderedDict(a=ONE),
        torch.Size([1, 2]), Cache(ONE),
    ],
    ids=lambda tree: type(tree).__qualname__,
)  # fmt: skip
def test_where_nothing_changes_the_same_object_comes_back(tree: Any):
    assert replace(tree, lambda tensor: tensor) is tree


@pytest.mark.parametrize(
    ("tree", "get"),
    [
        ([ONE, 1], lambda t: t[0]),
        ((1, [ONE]), lambda t: t[1][0]),
        ({"a": {"b": ONE}}, lambda t: t["a"]["b"]),
        (Pair(ONE, 1), lambda t: t.left),
        (Carried(ONE, "kept"), lambda t: t.hidden),
        (Carried(Carried(Carried(ONE))), lambda t: t.hidden.hidden.hidden),
        (Frozen(ONE), lambda t: t.hidden),
        (Slotted(ONE, [1]), lambda t: t.hidden),
        (Output(loss=ONE, logits=TWO), lambda t: t.loss),
        (Output(loss=ONE), lambda t: t["loss"]),
        (OrderedDict(b=ONE), lambda t: t["b"]),
        (defaultdict(list, b=ONE), lambda t: t["b"]),
    ],
)
def test_containers_are_rebuilt_with_their_type(tree: Any, get: Any):
    new = replace(tree, double)
    assert type(new) is type(tree) and new is not tree
    assert torch.equal(get(new), torch.full((2,), 2.0))
    assert torch.equal(get(tree), ONE), "the old one stays"


def test_what_else_a_container_holds_stays():
    assert replace(Carried(ONE, extra := object()), double).extra is extra
    assert replace(defaultdict(list, a=ONE), double).default_factory is list
    new = replace(torch.max(torch.ones(2, 2), 0), double)
    assert type(new) is torch.return_types.max
    assert new.values.tolist() == [2, 2]
    local = namedtuple("local", "a b")(ONE, 2)
    assert replace(local, double).b == 2


def test_opaque_objects_are_changed_in_place():
    cache = Cache(ONE)
    module = cache.module
    assert replace(cache, double) is cache
    assert cache.layers[0][0] == 2 and cache.deeper.inner.tensor[0] == 2
    assert cache.module is module
    assert replace(cache, lambda t: t * 0, attributes=False) is cache
    assert cache.layers[0][0] == 2, "left alone without attributes"


def test_modules_and_classes_are_not_searched():
    module = nn.Linear(2, 2)
    before = module.weight
    assert replace([module, Carried], lambda t: t + 1) == [module, Carried]
    assert module.weight is before


# --- descriptions ----------------------------------------------------------------------------------------


def empty(description: list[Any]) -> Tensor:
    dtype, shape, strides, requires_grad = description
    made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
    return made.requires_grad_(requires_grad)


def again(tree: Any, inputs: Any = ()) -> Any:
    """`tree` as another rank builds it from the text that it is told."""
    return build(json.loads(json.dumps(Describer(inputs).describe(tree))), [], empty, inputs)


def shape_of(tree: Any) -> Any:
    """`tree` with each tensor turned into what must be the same on both sides."""
    return replace(tree, lambda t: (str(t.dtype), tuple(t.shape), t.stride(), t.requires_grad))


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
        UsageError, match=r"returned a local of tests\.unit\.torch\.tensors\.test_nested, which this rank"
    ):
        again(local(ONE))
    with pytest.raises(UsageError, match="returned a Gone of nowhere"):
        find_class("nowhere:Gone", (object,))
    with pytest.raises(UsageError, match="define it at the top level of a module"):
        find_class("json:JSONDecoder", (dict,))


def test_dataclasses_with_defaults_made_elsewhere_are_built_without_their_constructor():
    @dataclass
    class Counted:
        hidden: Any
        made: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.made.append(1)

    assert replace(Counted(ONE), double).made == [1]
