"""How parts hang together: visits, skips, tied weights, what passes between parts."""

from __future__ import annotations

import copy
import re
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import weft.torch as weft
from tests import models
from weft.errors import UsageError

from ..compare import device
from .harness import ROWS, WIDTH, adamw, check, own_loss, placed, same_as_alone, seeded, start, vectors


def tokens(length: int = 6, steps: int = 3, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """For each step `ids` [rows, length]."""
    numbers = torch.Generator().manual_seed(12)
    return [{"ids": torch.randint(0, models.TOKENS, (rows, length), generator=numbers)} for _ in range(steps)]


def numbered(name: str, partitions: list[int]) -> dict[str, int]:
    """Places for the modules of a list."""
    return {f"{name}.{i}": partition for i, partition in enumerate(partitions)}


@check
def chain_split_automatically() -> None:
    same_as_alone(seeded(models.Chain, 6), vectors(), optimizer_of=adamw)


@check
def chain_split_by_hand() -> None:
    same_as_alone(seeded(models.Chain), vectors(), places=numbered("blocks", [0, 0, 1, 1]))


@check
def partition_visited_several_times() -> None:
    same_as_alone(seeded(models.Chain, 6), vectors(), places=numbered("blocks", [0, 1, 0, 1, 1, 0]))


@check
def pipeline_that_begins_and_ends_on_the_last_partition() -> None:
    same_as_alone(seeded(models.Chain, 5), vectors(), places=numbered("blocks", [1, 0, 1, 0, 1]))


@check
def partition_visited_several_times_simple_schedule() -> None:
    places = numbered("blocks", [0, 1, 0, 1])
    same_as_alone(seeded(models.Chain), vectors(), places=places, pipeline="gpipe")


@check
def one_active_microbatch() -> None:
    same_as_alone(
        seeded(models.Chain), vectors(), places=numbered("blocks", [0, 1, 0, 1]), active_microbatches=1
    )


@check
def more_active_microbatches_than_there_are() -> None:
    same_as_alone(
        seeded(models.Chain), vectors(), places=numbered("blocks", [0, 0, 1, 1]), active_microbatches=9
    )


@check
def fewer_microbatches_than_partitions() -> None:
    same_as_alone(seeded(models.Chain), vectors(), microbatches=1)
    same_as_alone(seeded(models.Chain), vectors(), microbatches=1, places=numbered("blocks", [0, 1, 0, 1]))


@check
def module_called_several_times() -> None:
    same_as_alone(seeded(models.Repeated), vectors(), places={"shared": 0, "other": 1})
    same_as_alone(seeded(models.Repeated), vectors(), places={"shared": 1, "other": 0})
    same_as_alone(seeded(models.Repeated), vectors())


@check
def skip_connections() -> None:
    places = {**numbered("down", [0, 0, 1]), "bottom": 1, **numbered("up", [1, 0, 0])}
    same_as_alone(seeded(models.Ladder), vectors(), places=places)
    same_as_alone(seeded(models.Ladder), vectors())


@check
def skip_that_passes_over_its_own_partition() -> None:
    places = {**numbered("down", [0, 1, 0]), "bottom": 1, **numbered("up", [0, 1, 0])}
    same_as_alone(seeded(models.Ladder), vectors(), places=places)


@check
def long_skips() -> None:
    same_as_alone(seeded(models.LongSkips), vectors(), places={"first": 0, **numbered("blocks", [0, 1, 1])})
    same_as_alone(seeded(models.LongSkips), vectors(), places={"first": 1, **numbered("blocks", [0, 1, 0])})
    same_as_alone(seeded(models.LongSkips), vectors())


@check
def tied_weights_on_one_partition() -> None:
    places = {"embed": 1, "head": 1, **numbered("blocks", [0, 0, 1])}
    same_as_alone(seeded(models.Tied), tokens(), own_loss, places=places)


@check
def tied_weights_split_automatically() -> None:
    same_as_alone(seeded(models.Tied), tokens(), own_loss, optimizer_of=adamw)


@check
def weight_tied_to_a_piece_of_a_part() -> None:
    same_as_alone(seeded(models.TiedInPart), tokens(), own_loss)
    places = {"embed": 0, "head.transform": 1, "head.decoder": 0, **numbered("blocks", [0, 1, 1])}
    same_as_alone(seeded(models.TiedInPart), tokens(), own_loss, places=places)


class Mixed(nn.Module):
    """A linear and what its own code makes of a bank of vectors that all such layers have (VB-LoRA)."""

    def __init__(self, bank: nn.Module) -> None:
        super().__init__()
        self.base, self.bank = nn.Linear(WIDTH, WIDTH), bank
        self.scores = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.scores.topk(2)
        added = (scores.softmax(-1).unsqueeze(-1) * self.bank.vectors[chosen]).sum(-2)
        return torch.tanh(self.base(x) + x @ added)


@check
def a_bank_of_vectors_in_all_parts() -> None:
    def make() -> nn.Module:
        bank = nn.ParameterDict({"vectors": torch.randn(4, WIDTH) / 4})
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixed(bank)) for _ in range(4)))

    same_as_alone(seeded(make), vectors())


class Added(nn.Module):
    """Adds to the weight of a linear by a parametrization for each call, as `target_parameters` of PEFT do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.added = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base, "weight", Plus(self.added))
        try:
            return torch.tanh(self.base(x))
        finally:
            weight = self.base.parametrizations.weight.original  # type: ignore[union-attr]
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
            self.base.weight = weight


class Plus(nn.Module):
    def __init__(self, added: Tensor) -> None:
        super().__init__()
        self.added = (added,)  # no parameter of this module

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.added[0]


@check
def weights_with_a_parametrization_for_a_call() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Added() for _ in range(3)))

    same_as_alone(seeded(make), vectors())


@check
def tied_weights_stay_tied() -> None:
    net = seeded(models.Tied)
    same_as_alone(net, tokens(), own_loss)
    names = [name for name, _ in net.named_parameters()]
    assert "head.weight" not in names or net.head.weight is net.embed.weight, names


@check
def several_inputs_and_outputs() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y, side = model(batch["x"])
        return F.mse_loss(y, batch["y"]) + side.square().mean()

    places = {"fork": 0, "join": 1, "again": 0, "last": 1}
    same_as_alone(seeded(models.ThreeWays), vectors(), loss_of, places=places)
    same_as_alone(seeded(models.ThreeWays), vectors(), loss_of)


@check
def output_that_nothing_uses() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"])[1], batch["y"])

    places = {"fork": 0, "join": 1, "again": 0, "last": 1}
    same_as_alone(seeded(models.ThreeWays), vectors(), loss_of, places=places)
    same_as_alone(seeded(models.ThreeWays), vectors(), loss_of)


@check
def nested_structures_between_parts() -> None:
    places = {"wrap": 0, "unwrap": 1, "rewrap": 0, "last": 1}
    same_as_alone(seeded(models.Nested), vectors(), places=places)
    same_as_alone(seeded(models.Nested), vectors())


class Pair(namedtuple("Pair", "left right")):
    """Looks at what it is made of, and fills in what is missing."""

    def __new__(cls, left: Tensor, right: Tensor | None = None) -> Pair:
        if left.device.type != device().type:
            raise ValueError(f"left is on {left.device}")
        return super().__new__(cls, left, 2 * left if right is None else right)


class Packing(nn.Module):
    """Two recurrent networks that are given packed sequences."""

    def __init__(self, inside: bool, sort: bool) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(models.TOKENS, WIDTH), nn.GRU(WIDTH, WIDTH)
        self.lstm, self.pad = nn.LSTM(WIDTH, WIDTH), Padding(inside)
        self.last = nn.Linear(WIDTH, 1)
        self.sort = sort

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if not self.sort:
            lengths = lengths.sort(descending=True)[0]
        packed = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=not self.sort
        )
        packed, state = self.gru(packed)
        packed, _ = self.lstm(packed, (state, torch.zeros_like(state)))
        packed = self.pad(packed)
        if not isinstance(packed, Tensor):
            packed = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])[0]
        return (self.last(packed) - 1).square().mean()


class Padding(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.scale = inside, nn.Parameter(torch.ones(WIDTH))

    def forward(self, packed: PackedSequence) -> Any:
        packed = packed._replace(data=packed.data * self.scale)
        return pad_packed_sequence(packed, batch_first=True, total_length=6)[0] if self.inside else packed


@check
def packed_sequences_between_parts() -> None:
    numbers = torch.Generator().manual_seed(4)
    batches = [{**each, "lengths": torch.randint(1, 7, (ROWS,), generator=numbers)} for each in tokens()]
    for inside, sort in ((True, True), (False, True), (False, False)):
        for at in (0, 1):
            places = {"embed": at, "gru": 1, "lstm": 0, "pad": 1, "last": 1 - at}
            same_as_alone(seeded(Packing, inside, sort), batches, own_loss, places=places)


@check
def named_tuples_that_look_at_what_they_are_made_of() -> None:
    class Make(nn.Linear):
        def forward(self, x: Tensor) -> Pair:
            return Pair(super().forward(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.last = Make(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            pair = self.make(x)
            pair = pair._replace(left=pair.left.tanh())
            return self.last(pair.left + pair.right)

    for at in (0, 1):
        same_as_alone(seeded(Net), vectors(), places={"make": at, "last": 1 - at})


@check
def keyword_arguments() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"], shift=batch["y"]), batch["y"])

    same_as_alone(seeded(models.Keywords), vectors(), loss_of, places=numbered("parts", [0, 1, 0, 1]))
    same_as_alone(seeded(models.Keywords), vectors(), loss_of)


def sequences(length: int = 6) -> list[dict[str, Tensor]]:
    """For each step `source`, `x` and `y` [ROWS, length, WIDTH]."""
    numbers = torch.Generator().manual_seed(13)
    shape = (ROWS, length, WIDTH)
    return [{name: torch.randn(shape, generator=numbers) for name in ("source", "x", "y")} for _ in range(3)]


def attending_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["source"], batch["x"]), batch["y"])


@check
def encoder_decoder_with_shared_tables_and_masks() -> None:
    net = seeded(models.CrossAttending)
    places = {**numbered("encoder", [0, 1]), **numbered("decoder", [0, 1, 0, 1])}
    same_as_alone(net, sequences(), attending_loss, places=places)
    same_as_alone(seeded(models.CrossAttending), sequences(), attending_loss)


@check
def angles_from_a_part_of_their_own() -> None:
    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH // 2))

        @torch.no_grad()
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.scale
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    class Net(models.CrossAttending):
        def __init__(self) -> None:
            super().__init__()
            self.angles = Angles()

        def forward(self, source: Tensor, x: Tensor) -> Tensor:
            table = self.angles(self.encoder[0](source, source, self.angles(source), None))
            for layer in self.decoder:
                x = layer(x, source, table, None)
            return x

    places = {"angles": 1, "encoder": 0, **numbered("decoder", [0, 1, 0, 1])}
    same_as_alone(seeded(Net), sequences(), attending_loss, places=places)
    same_as_alone(seeded(Net), sequences(), attending_loss)


@check
def parameters_used_in_glue() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.first, self.second = models.Block(), models.Block()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.start.expand(len(x), -1, -1), x[:, None]], dim=1)
            x = self.second(self.first(x) * self.scale)
            return F.linear(x, self.second.up.weight[:WIDTH]).mean(1) + self.scale * self.start[0]

    same_as_alone(seeded(Net), vectors(), places={"first": 0, "second": 1})
    same_as_alone(seeded(Net), vectors())


@check
def parts_that_return_their_input() -> None:
    class Twin(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = models.Block(), models.Block()
            self.nothing, self.dropout, self.empty = nn.Identity(), nn.Dropout(0.0), nn.Sequential()
            self.twin = Twin()

        def forward(self, x: Tensor) -> Tensor:
            x = self.dropout(self.nothing(x))
            x = self.empty(self.nothing(self.first(x)))
            same, more = self.twin(x)
            return self.nothing(self.dropout(self.second(same) + more))

    places = {"first": 0, "nothing": 1, "dropout": 0, "empty": 1, "twin": 1, "second": 1}
    same_as_alone(seeded(Net), vectors(), places=places)
    same_as_alone(seeded(Net), vectors(), places={**places, "first": 1, "twin": 0, "second": 0})
    same_as_alone(seeded(Net), vectors())


@check
def order_of_use_is_not_order_of_registration() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.third = models.Block(), models.Block()
            self.table = nn.ModuleDict({"second": models.Block(), "first": models.Block()})

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.third(self.table["second"](self.table["first"](x))))

    same_as_alone(seeded(Net), vectors())


@check
def pieces_called_from_outside_their_part() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(models.Block(), models.Block(), models.Block())
            self.late = models.Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[:2](x)
            x = x + self.late.down(F.relu(self.late.up(x)))
            for block in self.blocks[1:]:
                x = block(x)
            return self.late(x)

    same_as_alone(seeded(Net), vectors())


@check
def methods_other_than_forward() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([models.Block(), models.Block()])
            self.project = nn.Linear(WIDTH, WIDTH)

        def encode(self, x: Tensor, times: int = 1) -> Tensor:
            for _ in range(times):
                for block in self.blocks:
                    x = block(x)
            return x

        def features(self, x: Tensor) -> Tensor:
            return F.normalize(self.project(x), dim=-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Tower(), Tower()

        def forward(self, x: Tensor) -> Tensor:
            left = self.left.features(self.left.encode(x))
            return left @ self.right.features(self.right.encode(x, times=2)).T @ x

    same_as_alone(seeded(Net), vectors())


@check
def ready_made_modules_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, (h, c) = self.rnn(x)
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.head(self.encoder(y)) + (h * c).transpose(0, 1)

    places = {"rnn": 0, "attention": 1, "encoder": 0, "head": 1}
    same_as_alone(seeded(Net), vectors(5, WIDTH), places=places)
    same_as_alone(seeded(Net), vectors(5, WIDTH))


@check
def tensors_that_an_object_carries_from_part_to_part() -> None:
    """As a cache of keys and values does. A part on the rank that has them reads them first, later one elsewhere."""

    class Notes:
        """Not a container that anybody knows."""

        def __init__(self) -> None:
            self.left: list[Tensor] = []

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
            return self.linear(x).tanh() + (sum(notes.left) / 4 if notes else 0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Reader() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            notes = Notes()
            x = self.parts[0](x)
            notes.left.append(x / 2)
            x = self.parts[1](x)
            for part in self.parts[2:]:
                x = part(x, notes)
                notes.left.append(x / 2)
            return x

    for places in ([0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1]):
        same_as_alone(seeded(Net), vectors(), places=numbered("parts", places))


@check
def modules_that_the_first_step_does_not_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.rare = models.Block(), models.Block(), models.Block()
            self.way = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            return self.rare(x) if self.way else x

    for places in ({"a": 0, "b": 1, "rare": 0}, {"a": 1, "b": 0, "rare": 1}):
        net = seeded(Net)
        alone = copy.deepcopy(net)
        model = placed(net, places)
        step = weft.step(lambda model, x: model(x))
        x = vectors()[0]["x"]
        for way in (0, 1):
            net.way = alone.way = way
            torch.testing.assert_close(step(model, x).concat(), alone(x).detach())


@check
def leaves_that_keep_a_loss_in_an_attribute() -> None:
    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.weight
            self.loss = h.square().mean()
            return x + h.tanh()

    def net() -> nn.Module:
        return models.Composed(
            lambda net, x: net.d(net.c(net.b(net.a(x)))) + net.b.loss + net.d.loss,
            a=models.Block(),
            b=Leaf(),
            c=models.Block(),
            d=Leaf(),
        )

    same_as_alone(seeded(net), vectors())


class Ragged(nn.Module):
    """Makes a nested tensor in some way, and computes with it."""

    def __init__(self, make: Any, use: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.make, self.use = make, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.make(x))


def jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def strided(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:1], x[1:]])


def narrowed(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)], device=x.device))


def through_layers(module: Ragged, ragged: Tensor) -> Tensor:
    return module.second(module.first(ragged)).values()


def unbound(module: Ragged, ragged: Tensor) -> Tensor:
    return torch.cat([module.second(part) for part in module.first(ragged).unbind()])


def padded(module: Ragged, ragged: Tensor) -> Tensor:
    whole = torch.nested.to_padded_tensor(module.first(ragged), 0.0)
    return module.second(whole).sum(1)


@check
def nested_tensors_between_modules() -> None:
    def net(make: Any, use: Any) -> nn.Module:
        return models.Stack(a=models.Block(), ragged=Ragged(make, use), b=models.Block())

    for make, use in (
        (jagged, through_layers), (jagged, unbound), (strided, unbound), (strided, padded), (narrowed, through_layers),
        (narrowed, unbound),
    ):  # fmt: skip
        same_as_alone(seeded(net, make, use), vectors())


@check
def lazy_modules_are_refused_when_wrapped() -> None:
    start()
    for layer in (
        nn.LazyLinear(WIDTH), nn.LazyConv2d(4, 1), nn.LazyBatchNorm1d(), nn.LazyInstanceNorm2d(affine=True),
        nn.ModuleList([nn.Linear(2, 2), nn.LazyConvTranspose1d(4, 1)]),
    ):  # fmt: skip
        try:
            weft.DistributedModel(nn.Sequential(layer))
        except UsageError as error:
            assert re.search(r"\(0\.(1\.)?weight", str(error)) and "module(example)" in str(error), error
        else:
            raise AssertionError(f"no error: {layer}")
