"""What a call has put into containers and objects is told as data, and made in the same places elsewhere."""

from __future__ import annotations

import copy
import json
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.calls.container_writes import Contents, Filled, fills, puts_the_same
from weft.torch.calls.placeholders import Left, mark_left
from weft.torch.tensors.description import Describer, build
from weft.torch.tensors.pytree import tensors_in


class Layer:
    """As a layer of a cache."""

    keys: Any = None

    def __init__(self) -> None:
        self.device: Any = None


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.seen = 0


def told(before: Any, call: Callable[[Any], object]) -> Any:
    """What another rank's copy of ``before`` holds after the call, which only this rank makes."""
    other = copy.deepcopy(before)
    mine, theirs = Contents([before]), Contents([other])
    assert mine.signature() == theirs.signature()
    call(before)
    changes = mine.changes()
    text = json.dumps(Describer(()).describe(Filled(None, changes, {})))

    def make(description: Any) -> Tensor:
        return torch.empty(description[1], device="meta")

    theirs.apply(build(json.loads(text), [], make, ()).changes)
    held = tensors_in(changes)
    mine.restore()
    mine.apply(changes)
    assert [tensor for tensor in Contents([before]).tensors if any(tensor is one for one in held)] or not held
    assert Contents([before]).signature() == Contents([other]).signature()
    return other


def fill_cache(cache: Cache) -> None:
    cache.layers[1].keys = torch.ones(2, 3)
    cache.layers[1].device = torch.device("cpu")
    cache.seen += 3


def add_layer(cache: Cache) -> None:
    cache.layers.append(Layer())
    cache.layers[-1].keys = (torch.ones(1), [torch.ones(2)])


def test_objects_are_filled() -> None:
    cache = told(Cache(), fill_cache)
    assert cache.layers[1].keys.shape == (2, 3) and cache.layers[0].keys is None
    assert cache.seen == 3 and cache.layers[1].device == torch.device("cpu")


def test_new_objects_are_made() -> None:
    cache = told(Cache(), add_layer)
    assert type(cache.layers[2]) is Layer and cache.layers[2].keys[1][0].shape == (2,)


def move(store: Any) -> None:
    store["b"], store["c"] = store.pop("a"), {"x": [torch.ones(1)]}


CASES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1, torch.ones(1)], lambda store: store.insert(0, torch.ones(4))),
    "shorter": (["a", torch.ones(1), "b"], lambda store: store.pop(0)),
    "deque": (deque([1, 2], maxlen=2), lambda store: store.append(torch.ones(1))),
    "set": ({1, 2}, lambda store: (store.remove(1), store.add("x"))),
    "dict": ({"a": [torch.ones(2)], "z": 1}, move),
    "own dict": (UserDict(a=1), lambda store: store.update(b=torch.ones(1))),
    "nested": (([], {"seen": []}), lambda store: store[1]["seen"].append((torch.ones(1), 2))),
    "deleted": (Cache(), lambda cache: delattr(cache, "seen")),
    "moved": (Cache(), lambda cache: setattr(cache, "last", cache.layers[0])),
    "nothing": ({"a": 1000, "b": torch.ones(1)}, lambda store: store.update(a=int("1000"))),
}


@pytest.mark.parametrize("name", CASES)
def test_containers_are_filled(name: str) -> None:
    before, call = CASES[name]
    expected = copy.deepcopy(before)
    call(expected)
    other = told(before, call)
    assert _shape(other) == _shape(expected) == _shape(before)


def _shape(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return list(tree.shape)
    if isinstance(tree, (dict, UserDict)):
        return [(key, _shape(item)) for key, item in tree.items()]
    if isinstance(tree, set):
        return sorted(map(str, tree))
    if isinstance(tree, (list, tuple, deque)):
        return [type(tree).__name__, *map(_shape, tree)]
    return _shape(vars(tree)) if isinstance(tree, (Cache, Layer)) else tree


def test_one_object_in_two_places_stays_one() -> None:
    cache = Cache()
    other = told(cache, lambda cache: setattr(cache, "last", cache.layers[0]))
    assert other.last is other.layers[0] and cache.last is cache.layers[0]


def test_new_containers_stay_those_of_the_call() -> None:
    made, store = [torch.ones(1)], {}

    def call(store: Any) -> None:
        store["made"] = made

    told(store, call)
    assert store["made"] is made


class Named(dict[str, Any]):
    seen = 0


def count(store: Named) -> None:
    store.seen, store["a"] = 2, Named(b=torch.ones(1))
    store["a"].seen = 3


def test_attributes_of_containers_are_told() -> None:
    other = told(Named(), count)
    assert type(other) is type(other["a"]) is Named
    assert (other.seen, other["a"].seen, [*other["a"]]) == (2, 3, ["b"])


def same_list_twice(store: Any) -> None:
    store["a"] = store["b"] = []


def test_a_new_list_in_two_places_stays_one() -> None:
    other = told({}, same_list_twice)
    assert other["a"] is other["b"] == []


def set_anew(cache: Any) -> None:
    layers = cache.layers
    del cache.layers
    cache.layers = layers


def test_attributes_have_one_order_everywhere() -> None:
    assert [*vars(told(Cache(), set_anew))] == ["seen", "layers"]


def test_results_hold_what_was_given_and_made() -> None:
    given: list[Any] = []
    contents, made = Contents([given]), {"x": 1}
    given.append(made)
    changes = contents.changes()
    result = contents.refer({"given": [given], "made": (made, 2)})
    description = json.loads(json.dumps(Describer(()).describe(Filled(result, changes, {}))))
    theirs: list[Any] = []
    other = Contents([theirs])
    filled = build(description, [], lambda each: torch.empty(0), ())
    other.apply(filled.changes)
    found = other.find(filled.result)
    assert found["given"][0] is theirs and found["made"][0] is theirs[0] == {"x": 1}
    assert contents.find(result)["made"][0] is made


REFUSED: dict[str, Callable[[Any], object]] = {
    "functions": lambda store: store.update(a=test_objects_are_filled),
    "what is made where a key lacks": lambda store: store.update(a=defaultdict(list)),
    "how long a queue may be": lambda store: store.update(a=deque([1], maxlen=2)),
    "tensors as keys": lambda store: store.update({torch.ones(1): 1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_others_cannot_be_told_is_refused(name: str) -> None:
    store: dict[Any, Any] = {}
    contents = Contents([store])
    REFUSED[name](store)
    with pytest.raises(UsageError):
        Describer(()).describe(contents.changes())


def test_signatures_tell_caches_apart() -> None:
    one, other = Cache(), Cache()
    fill_cache(other)
    assert Contents([one]).signature() != Contents([other]).signature()
    assert hash(Contents([one]).signature()) == hash(Contents([Cache()]).signature())


def test_calls_that_put_something_else_are_noticed() -> None:
    def description(call: Callable[[Any], object]) -> list[Any]:
        store: dict[str, Any] = {}
        contents = Contents([store])
        call(store)
        return Describer(()).describe(Filled(torch.ones(1), contents.changes(), {}))

    one = description(lambda store: store.update(a=torch.ones(2)))
    assert puts_the_same(one, description(lambda store: store.update(a=torch.zeros(2).requires_grad_())))
    assert not puts_the_same(one, description(lambda store: store.update(a=torch.ones(3))))
    assert not puts_the_same(one, description(lambda store: store.update(b=torch.ones(2))))
    assert fills(one) and not fills(description(lambda store: None))
    assert (
        Filled(None, [(0, [("a", 0.5)])], {}).uncertain
        and not Filled(None, [(0, [("a", True)])], {}).uncertain
    )


def test_tensors_are_local_during_the_call_only() -> None:
    kept, local = torch.ones(2), torch.zeros(2)
    cache, store = Cache(), {"pair": (kept, 1)}
    cache.layers[0].keys = kept
    contents = Contents([cache, store])
    assert len(contents.tensors) == 2
    contents.localise(lambda tensor: local)
    assert cache.layers[0].keys is kept
    contents.local()
    assert cache.layers[0].keys is local and store["pair"][0] is local and not contents.changes()
    contents.restore()
    assert cache.layers[0].keys is kept and store["pair"][0] is kept


def test_what_was_left_elsewhere_refuses_to_be_used() -> None:
    tensor = torch.empty(2, 3, device="meta")
    mark_left(tensor, "layers.0", 1, torch.device("cpu"))
    assert type(tensor) is Left and tensor.shape == (2, 3) and tensor.numel() == 6
    assert tensor.device.type == "cpu" and not tensor.is_meta
    uses = (
        lambda: tensor + 1, lambda: torch.cat([torch.ones(1, 3), tensor]), lambda: torch.ones(2, 3).copy_(tensor),
        lambda: tensor[0], lambda: tensor.sum().item(), lambda: bool(tensor.any()), lambda: tensor.detach(),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="layers.0 has put .* lies on partition 1"):
            use()


def test_what_another_unit_has_filled_is_passed_by():
    """It counts neither as a thing nor in the signature; a thing that holds anything else does."""
    cache = Cache()
    cache.layers[0].keys, cache.layers[1].keys = theirs, mine = torch.ones(2, 3), torch.ones(2, 3)
    found = Contents([cache], lambda tensor: tensor is theirs)
    assert found.things == [cache, cache.layers, cache.layers[1]]
    assert [thing for thing, _ in found.passed_by] == [cache.layers[0]]
    assert len(found.tensors) == 1 and found.tensors[0] is mine
    before = found.signature()
    cache.layers[0].keys = theirs = torch.ones(2, 4)
    assert Contents([cache], lambda tensor: tensor is theirs).signature() == before
    assert Contents([cache]).signature() != before
    cache.layers[0].more = [mine]
    assert not Contents([cache], lambda tensor: tensor is theirs).passed_by


def test_writes_into_what_was_passed_by_are_found():
    cache = Cache()
    cache.layers[0].keys = theirs = torch.ones(2, 3)
    found = Contents([cache], lambda tensor: tensor is theirs)
    local = theirs.clone()
    found.localise(lambda tensor: tensor, lambda tensor: local)
    found.local()
    assert cache.layers[0].keys is local and found.beside() == [local] and found.written_beside() is None
    cache.layers[0].keys = torch.zeros(2, 3)
    assert found.written_beside() is cache.layers[0]
    found.restore()
    assert cache.layers[0].keys is theirs
