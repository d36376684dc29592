"""Nested structures: what is replaced, and what stays the same object."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from weft.torch.tensors.pytree import items_of, map_nodes, map_tensors, nodes_with_paths, tensors_in


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
    assert map_tensors(tree, lambda tensor: tensor, attributes=True) is tree


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
    new = map_tensors(tree, double)
    assert type(new) is type(tree) and new is not tree
    assert torch.equal(get(new), torch.full((2,), 2.0))
    assert torch.equal(get(tree), ONE), "the old one stays"


def test_what_else_a_container_holds_stays():
    assert map_tensors(Carried(ONE, extra := object()), double).extra is extra
    assert map_tensors(defaultdict(list, a=ONE), double).default_factory is list
    new = map_tensors(torch.max(torch.ones(2, 2), 0), double)
    assert type(new) is torch.return_types.max
    assert new.values.tolist() == [2, 2]
    local = namedtuple("local", "a b")(ONE, 2)
    assert map_tensors(local, double).b == 2


def test_opaque_objects_are_changed_in_place():
    cache = Cache(ONE)
    module = cache.module
    assert map_tensors(cache, double, attributes=True) is cache
    assert cache.layers[0][0] == 2 and cache.deeper.inner.tensor[0] == 2
    assert cache.module is module
    assert map_tensors(cache, lambda t: t * 0) is cache
    assert cache.layers[0][0] == 2, "left alone without attributes"


def test_modules_and_classes_are_not_searched():
    module = nn.Linear(2, 2)
    before = module.weight
    assert map_tensors([module, Carried], lambda t: t + 1, attributes=True) == [module, Carried]
    assert module.weight is before


def test_dataclasses_with_defaults_made_elsewhere_are_built_without_their_constructor():
    @dataclass
    class Counted:
        hidden: Any
        made: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.made.append(1)

    assert map_tensors(Counted(ONE), double).made == [1]


def test_a_dataclass_is_a_container_unless_it_is_a_module():
    @dataclass
    class Called(Carried):
        def __call__(self) -> None:
            pass

    @dataclass(eq=False)
    class Layer(nn.Module):
        hidden: Any

        def __post_init__(self) -> None:
            super().__init__()

    assert map_tensors(Called(ONE), double).hidden[0] == 2
    layer = object.__new__(Layer)
    nn.Module.__init__(layer)
    layer.hidden = ONE
    assert map_tensors(layer, double, attributes=True) is layer and layer.hidden is ONE
    assert items_of(layer) is None and items_of(Carried) is None


def test_tensors_in_attributes_are_found_where_they_are_asked_for():
    assert tensors_in([Cache(ONE), TWO]) == [TWO]
    assert list(map(id, tensors_in([Cache(ONE), TWO], attributes=True))) == [id(ONE), id(ONE), id(TWO)]


def test_a_node_is_opened_only_where_the_function_leaves_it():
    tree = {"a": [1, 2], "b": (3,)}
    assert map_nodes(tree, lambda node: sum(node) if isinstance(node, list) else node) == {"a": 3, "b": (3,)}
    assert map_nodes(tree, lambda node: node) is tree


def test_paths_are_as_python_writes_them():
    tree = Carried([ONE, Output(loss=TWO)], {3: {"x"}})
    found = nodes_with_paths(tree, "t", (list, dict, set, Carried), lambda node: isinstance(node, Output))
    assert [path for path, _ in found] == [
        "t", "t.hidden", "t.hidden[0]", "t.hidden[1]", "t.extra", "t.extra[3]", "t.extra[3][0]",
    ]  # fmt: skip
