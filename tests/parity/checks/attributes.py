"""What modules keep in their attributes while microbatches are in flight together."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests.training import squares, step_of
from weft.errors import PeerError, PlacementError
from weft.torch.tensors.pytree import tensors_in

from ..compare import device
from .harness import WIDTH, check, placed, same_as_alone, seeded, squared_error, start, vectors

HALVES = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
ALTERNATING = {"layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1}


class Layer(nn.Module):
    """A layer that does `note(layer, x, h)` with what it computes."""

    def __init__(self, note: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        return self.note(self, x, self.up(x).tanh())


class Net(nn.Module):
    """Four layers between `before(net, x)` and `after(net, x)`."""

    def __init__(self, before: Any, note: Any, after: Any) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(note) for _ in range(4))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.after(self, x)


def unchanged(net: Any, x: Tensor) -> Tensor:
    return x


def added(layer: Any, x: Tensor, h: Tensor) -> Tensor:
    return x + h


def split_in_ways(before: Any, note: Any, after: Any, **settings: Any) -> None:
    """Checks it split by weft, and by hand in two ways, with each schedule that has another order."""
    same_as_alone(seeded(Net, before, note, after), vectors(), **settings)
    for places in (HALVES, ALTERNATING):
        for pipeline in ("1f1b", "gpipe"):
            net = seeded(Net, before, note, after)
            same_as_alone(net, vectors(), places={**places, "encode": 0}, pipeline=pipeline, **settings)


@check
def losses_of_layers_kept_in_attributes() -> None:
    """As mixtures of experts keep what balances them."""

    def note(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.aux = h.square().mean()
        return x + h

    def after(net: Any, x: Tensor) -> Tensor:
        return x + sum(layer.aux for layer in net.layers)

    same_as_alone(seeded(Net, unchanged, note, after), vectors())


@check
def batch_kept_in_an_attribute_by_the_model() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        net.scale = x.abs().mean(1, keepdim=True)
        return net.encode(x)

    def after(net: Any, x: Tensor) -> Tensor:
        return x / net.scale

    split_in_ways(before, added, after)


@check
def number_read_from_a_tensor_and_kept() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        x = net.encode(x)
        net.level = x.abs().max().item()
        return x

    def after(net: Any, x: Tensor) -> Tensor:
        return x * net.level

    split_in_ways(before, added, after)


@check
def condition_that_the_model_hands_to_its_layers() -> None:
    """Layers read what another module has computed, out of attributes that the model has set."""

    def before(net: Any, x: Tensor) -> Tensor:
        seen = net.encode(x)
        for layer in net.layers:
            layer.seen = seen
        return x

    def note(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        return h + layer.seen * 0.5

    split_in_ways(before, note, unchanged)


@check
def argument_that_the_model_hands_to_its_layers() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(net.layers):
            layer.seen = x * number
        return net.encode(x)

    def note(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        return h * layer.seen + x

    split_in_ways(before, note, unchanged)


@check
def result_of_a_part_kept_for_later() -> None:
    """The skip of a U-Net, kept in an attribute."""

    def before(net: Any, x: Tensor) -> Tensor:
        net.skip = net.encode(x)
        return net.skip.sin()

    def after(net: Any, x: Tensor) -> Tensor:
        return x * net.skip

    split_in_ways(before, added, after)


@check
def attribute_that_is_deleted_again() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        net.scale = x.abs().mean(1, keepdim=True)
        return net.encode(x)

    def after(net: Any, x: Tensor) -> Tensor:
        x = x / net.scale
        del net.scale
        return x

    split_in_ways(before, added, after)


@check
def attribute_of_one_part_that_goes_from_microbatch_to_microbatch() -> None:
    """A running mean that is no buffer, inside of a layer: microbatches change it in order."""

    def note(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.mean = 0.9 * getattr(layer, "mean", 0.0) + 0.1 * h.detach().mean()
        return x + h + layer.mean

    split_in_ways(unchanged, note, unchanged)


class Filling(nn.Module):
    """Layers that put what they compute into a container that they are given; some of it is used."""

    def __init__(self, make: Callable[[], Any], put: Callable[[Any, int, Tensor], None], use: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH)}) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.forward = self.layer(layer, number, put)
        self.make, self.use = make, use

    @staticmethod
    def layer(layer: Any, number: int, put: Any) -> Callable[[Tensor, Any], Tensor]:
        def forward(x: Tensor, store: Any) -> Tensor:
            h = layer["up"](x).tanh()
            put(store, number, h)
            return x + h

        return forward

    def forward(self, x: Tensor) -> Tensor:
        store = self.make()
        for layer in self.layers:
            x = layer(x, store)
        return x * self.use(store)


CONTAINERS = {
    "dict": (dict, lambda store, number, h: store.update({number: h}), lambda store: store[3] + store[0]),
    "list": (list, lambda store, number, h: store.append(h), lambda store: store[-1] - store[1]),
    "deque": (deque, lambda store, number, h: store.append(h), lambda store: store.popleft()),
    "own dict": (UserDict, lambda store, number, h: store.update({number: h}), lambda store: store[2]),
    "nested": (
        lambda: ([], {"seen": []}),
        lambda store, number, h: store[1]["seen"].append(h if number else h * 2),
        lambda store: store[1]["seen"][-1] * len(store[1]["seen"]),
    ),
    "counted": (
        lambda: {"seen": []},
        lambda store, number, h: store["seen"].append(number),
        lambda store: len(store["seen"]),
    ),
    "replaced": (
        lambda: [0.0],
        lambda store, number, h: store.__setitem__(0, store[0] + h),
        lambda store: store[0],
    ),
}


@check
def containers_that_layers_fill() -> None:
    for kinds in CONTAINERS.values():
        torch.manual_seed(3)
        net, alone = Filling(*kinds), Filling(*kinds)
        alone.load_state_dict(net.state_dict())
        same_as_alone(net.to(device()), vectors(), alone=alone.to(device()))


@check
def table_made_by_the_first_microbatch() -> None:
    def after(net: Any, x: Tensor) -> Tensor:
        if not hasattr(net, "table"):
            net.table = torch.arange(WIDTH, device=x.device) / WIDTH
        return x * net.table

    split_in_ways(unchanged, added, after)


@check
def counter_of_the_model() -> None:
    def after(net: Any, x: Tensor) -> Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        return x

    net = seeded(Net, unchanged, added, after)
    same_as_alone(net, vectors(), places={**HALVES, "encode": 0})
    assert net.calls == 3 * 4


@check
def attributes_after_a_step_are_those_of_the_last_microbatch() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        net.seen = x.sum().item()
        return x

    net = seeded(Net, before, added, unchanged)
    batches = vectors()
    same_as_alone(net, batches, places={**HALVES, "encode": 0})
    assert abs(net.seen - batches[-1]["x"][-2:].sum().item()) < 1e-4


@check
def attributes_that_only_some_microbatches_write() -> None:
    """They are what the last one of these has left."""

    def before(net: Any, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            net.seen = x.sum().item()
            net.kept = x * 1.0
        return x

    def after(net: Any, x: Tensor) -> Tensor:
        return x * (0.5 if x.detach().mean().item() > 0 else 1.0)

    for places in (HALVES, ALTERNATING):
        net = seeded(Net, before, added, after)
        batches = vectors()
        same_as_alone(net, batches, places={**places, "encode": 0})
        positive = [part for batch in batches for part in batch["x"].chunk(4) if part.sum().item() > 0]
        assert abs(net.seen - positive[-1].sum().item()) < 1e-4
        torch.testing.assert_close(net.kept, positive[-1])


@check
def attributes_after_a_step_are_as_they_were_written_last() -> None:
    """By whichever rank; the others have no old data then."""

    def before(net: Any, x: Tensor) -> Tensor:
        net.own, net.several = x * 2, {"rows": [x + 1]}
        return x

    def after(net: Any, x: Tensor) -> Tensor:
        rows = torch.tensor([0, 1])
        net.own[rows] = x[rows] * 0.5  # every rank's so far
        net.several["rows"][0].mul_(x)
        net.result = x * 1.0
        with torch.no_grad():
            net.result.add_(1)
        return x

    for places in (HALVES, ALTERNATING):
        alone = seeded(Net, before, added, after)
        model = placed(net := seeded(Net, before, added, after), places)
        x = vectors(steps=1)[0]["x"]
        step = weft.step(lambda model, x: model(x))
        step(model, x)
        alone(x.chunk(4)[-1])
        seen = 0
        for mine, expected in (
            (net.own, alone.own), (net.several["rows"][0], alone.several["rows"][0]), (net.result, alone.result),
        ):  # fmt: skip
            if mine.device.type != "meta":
                torch.testing.assert_close(mine, expected)
                seen += 1
        assert seen == (3 if weft.pp_rank() == 1 else 0), seen


@check
def what_a_layer_keeps_shows_what_is_written_into_it_later() -> None:
    """An argument, a view, a result, a list of them, an attribute of another module: one memory, whoever writes."""

    def argument(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.kept = x
        return h

    def view(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.kept = x[:, 0]
        return h

    def result(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.kept = h = h * 1.5
        return h

    def several(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.kept = {"seen": [x, h]}
        return h * 1.0

    def next_one(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.beside[0].kept = x
        return h

    for note, places in itertools.product(
        (argument, view, result, several, next_one), (HALVES, {**HALVES, "encode": 1})
    ):
        pair = []
        for start_over in (False, True):
            net = seeded(Writing, note)
            pair.append(net)
            if start_over:
                model = placed(net, places)
                step = weft.step(lambda model, x: model(x))
                step(model, vectors(steps=1)[0]["x"])
            else:
                net(vectors(steps=1)[0]["x"].chunk(4)[-1])
        shown = 0
        for alone, mine in zip(kept_in(pair[0]), kept_in(pair[1]), strict=False):
            if mine.device.type != "meta":
                torch.testing.assert_close(mine, alone)
                shown += 1
        assert shown or weft.pp_rank() != places["encode"], note.__name__


class Writing(nn.Module):
    """A layer on each side of a part that writes into what they have seen and given."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(note) for _ in range(4))
        for one, other in zip(self.layers, self.layers[1:], strict=False):
            one.beside = [other]  # no child of it

    def forward(self, x: Tensor) -> Tensor:
        seen = self.encode(x) * 2
        out = self.layers[0](seen)
        further = self.layers[2](out.sin())
        with torch.no_grad():
            seen *= 0.5
            out += 1
        return further + seen + out


def kept_in(net: nn.Module) -> list[Tensor]:
    return [tensor for module in net.modules() for tensor in tensors_in(vars(module).get("kept"))]


@check
def counter_used_before_the_first_module() -> None:
    """Annealing, say."""

    def before(net: Any, x: Tensor) -> Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        return net.encode(x / (1 + 0.1 * net.calls))

    split_in_ways(before, added, unchanged)


@check
def counter_used_by_a_layer_that_has_it() -> None:
    def note(layer: Any, x: Tensor, h: Tensor) -> Tensor:
        layer.calls = getattr(layer, "calls", 0) + 1
        return x + h / (1 + 0.1 * layer.calls)

    def after(net: Any, x: Tensor) -> Tensor:
        return net.layers[1](x)  # once more

    split_in_ways(unchanged, note, after)


@check
def number_that_the_model_brings_back() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        net.depth = getattr(net, "depth", 0) + 1
        return net.encode(x)

    def after(net: Any, x: Tensor) -> Tensor:
        x = x / net.depth
        net.depth -= 1
        return x

    def deeper(net: Any, x: Tensor) -> Tensor:
        before(net, x)
        return before(net, x)

    def all_the_way(net: Any, x: Tensor) -> Tensor:
        return after(net, after(net, x))

    for first, last in ((before, after), (deeper, all_the_way)):
        for places in (HALVES, ALTERNATING):
            net = seeded(Net, first, added, last)
            net.depth = 0
            same_as_alone(net, vectors(), places={**places, "encode": 0})
            assert net.depth == 0


@check
def cache_that_the_model_empties() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        if net.cache is None:
            net.cache = net.encode(x)
        return x

    def after(net: Any, x: Tensor) -> Tensor:
        if net.cache is not None:
            x = x * net.cache
        net.cache = None
        return x

    for places in (HALVES, ALTERNATING):
        net = seeded(Net, before, added, after)
        net.cache = None
        same_as_alone(net, vectors(), places={**places, "encode": 0})
        assert net.cache is None


@check
def flag_that_the_model_sets_and_takes_back() -> None:
    def before(net: Any, x: Tensor) -> Tensor:
        net.busy = not net.busy
        return net.encode(x)

    def after(net: Any, x: Tensor) -> Tensor:
        x = x.sin() if net.busy else x.cos()
        net.busy = False
        return x

    for places in (HALVES, ALTERNATING):
        net = seeded(Net, before, added, after)
        net.busy = False
        same_as_alone(net, vectors(), places={**places, "encode": 1})


@check
def carried_numbers_of_a_split_model_are_refused() -> None:
    def level(net: Any, x: Tensor) -> Tensor:
        net.level = 0.9 * net.level + 0.1 * x.mean().item()
        return x * net.level

    def counted(net: Any, x: Tensor) -> Tensor:
        net.level += 1
        return x * net.level

    def alternating(net: Any, x: Tensor) -> Tensor:
        net.level = -net.level
        return x * net.level

    def sometimes(net: Any, x: Tensor) -> Tensor:
        x = x * 2 if net.level % 2 else x
        net.level += 1
        return x

    def in_the_middle(net: Any, x: Tensor) -> Tensor:
        before = net.level
        x = net.layers[0](x)
        net.level = before + 1
        return x * before

    for after, first in ((level, 1.0), (counted, 1), (alternating, 1), (sometimes, 0), (in_the_middle, 0)):
        refused_on_every_rank(after, first)
        gc.collect()  # the error's frames hold the model, which would take part in the next steps of one rank only


def refused_on_every_rank(after: Callable[[Any, Tensor], Tensor], first: float) -> None:
    net = seeded(Net, unchanged, added, after)
    net.level = first
    start(auto_partition=False)
    for name, partition in HALVES.items():
        weft.set_partition(net.get_submodule(name), partition)
    model = weft.DistributedModel(net)
    train_step = step_of(squares)
    with pytest.raises(
        (PlacementError, PeerError), match="level carries a value from one microbatch to the next"
    ):
        train_step(model, torch.ones(8, WIDTH))


# --- buffers that a split model writes itself ------------------------------------------------------------------------


class Buffered(Net):
    """Has a buffer, `level`."""

    def __init__(self, before: Any, note: Any, after: Any) -> None:
        super().__init__(before, note, after)
        self.register_buffer("level", torch.zeros(()))


def raised(net: Any, x: Tensor) -> Tensor:
    net.level.mul_(0.9).add_(1.0)
    return x / (1 + net.level)


def written_by_the_argument(net: Any, x: Tensor) -> Tensor:
    net.level.lerp_(x.mean(), 0.1)
    return net.encode(x) - net.level


def twice(net: Any, x: Tensor) -> Tensor:
    return raised(net, net.encode(raised(net, x)))


@check
def buffers_of_a_split_model() -> None:
    """Microbatches begin in order, and end in order."""
    for before, after in (
        (raised, unchanged),
        (written_by_the_argument, unchanged),
        (twice, unchanged),
        (unchanged, raised),
    ):
        for places in (HALVES, ALTERNATING):
            for pipeline in ("1f1b", "gpipe", "zb_h1"):
                net = seeded(Buffered, before, added, after)
                same_as_alone(net, vectors(), places={**places, "encode": 0}, pipeline=pipeline)


class Store:
    """What a model's own class of a cache does: it is filled, and gives all that it holds."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: dict[int, Tensor] = {}

    def update(self, key: Tensor, value: Tensor, number: int) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values[number] = value
        return sum(self.keys[1:], self.keys[0]), torch.stack([*self.values.values()]).sum(0)


@dataclasses.dataclass
class Record:
    """The same as a dataclass."""

    keys: list[Tensor] = dataclasses.field(default_factory=list)
    values: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    update = Store.update


class Table(UserDict[int, Any]):
    """The same as a dict of its own."""

    def put(self, key: Tensor, value: Tensor, number: int) -> tuple[Tensor, Tensor]:
        self[number] = (key, value)
        return sum(a for a, _ in self.data.values()), sum(b for _, b in self.data.values())


class Allocated:
    """One whose memory is made when it is first filled."""

    rows: Any = None

    def update(self, key: Tensor, value: Tensor, number: int) -> tuple[Tensor, Tensor]:
        if self.rows is None:
            self.rows = torch.zeros_like(key)
        self.rows = self.rows + key * (number + 1)
        return self.rows, value


def put_into(store: Any, key: Tensor, value: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Key and value of all layers so far."""
    if isinstance(store, dict):
        store[number] = (key, value)
        return sum(a for a, _ in store.values()), sum(b for _, b in store.values())
    return (store.put if isinstance(store, Table) else store.update)(key, value, number)


class Storing(nn.Module):
    """An attention layer as far as its cache is concerned."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, store: Any) -> Tensor:
        key, value = put_into(store, self.key(x), self.value(x), self.number)
        return x + self.out(key.tanh() * value)


@check
def stores_that_layers_share_and_fill() -> None:
    """Inside of an activation checkpoint too, where one process would fill them once more as it goes backward."""

    class Stack(nn.Module):
        def __init__(self, make: Callable[[], Any], inside: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Storing(number) for number in range(4))
            self.make, self.inside = make, inside

        def forward(self, x: Tensor) -> Tensor:
            store = self.make()
            for layer in self.layers:
                x = checkpoint(layer, x, store, use_reentrant=False) if self.inside else layer(x, store)
            return x

    for make in (dict, Store, Record, Table, Allocated):
        for inside in (False, True):
            for places in (HALVES, None):
                net, alone = seeded(Stack, make, inside), seeded(Stack, make, False)
                same_as_alone(net, vectors(), places=places, alone=alone, verify="losses")


@check
def running_means_of_a_module_without_parameters() -> None:
    """It has a place then, and sees the microbatches in order, though they come twice."""

    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Any = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + x.detach().mean()
            return x - self.mean

    class Centred(Net):
        def __init__(self) -> None:
            super().__init__(unchanged, added, unchanged)
            self.centre = Centre()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[3](self.centre(self.layers[0](super().forward(x))))

    def twice(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) + squared_error(model, {"x": batch["y"], "y": batch["x"]})

    for places in (HALVES, ALTERNATING, {**ALTERNATING, "centre": 1}, None):
        same_as_alone(seeded(Centred), vectors(), twice, places=places)
