"""Steps of models whose sequences are cut over ranks; started by `test_sequences.py`.

    sequences.py --folder FOLDER --partitions 2 check...       with context_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import weft.torch as weft
from tests import training
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.parity.zoo.case import Case
from tests.training import made_late, next_words, sgd, squares, start, step_of
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.context_parallel import Sequences
from weft.torch.context_parallel.all_to_all import FACTOR
from weft.torch.context_parallel.apply import Region
from weft.torch.session import current
from weft.torch.tensor_parallel import axes_of, is_cut
from weft.torch.tensor_parallel.functions import Functions
from weft.torch.tensor_parallel.shard_group import ShardGroup

CHECKS = Checks()
given = CHECKS.given
WIDTH, WORDS, LENGTH, HEADS = 12, 31, 9, 4


class Layer(nn.Module):
    """Causal attention and two linears, with norms and residual paths.

    ``flat``: the two see samples and positions as one dimension.
    """

    def __init__(self, rate: float, width: int = WIDTH, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.before, self.between = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.rate, self.causal = rate, True

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.rate, self.training)
        normed = self.between(x).flatten(0, 1) if self.flat else self.between(x)
        return x + self.outer(F.gelu(self.inner(normed))).view_as(x)


class Words(nn.Module):
    """Words and places, layers, and scores by the weight of the words."""

    def __init__(self, rate: float, layers: int = 4, places: int = 16, width: int = WIDTH) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(places, width)
        self.layers = nn.ModuleList(Layer(rate, width, number == 1) for number in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Scaled(Words):
    """Code between layers uses weights: a scale, and the table of words for the scores."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.scale
        for layer in self.layers:
            x = layer(x) + self.scale
        return self.norm(x) @ self.words.weight.t()


def words_of(number: int, length: int = 8) -> Tensor:
    return torch.randint(0, WORDS, (8, length), generator=torch.Generator().manual_seed(number))


class Job(training.Job):
    """A model of words, and the same in one process. Every length of a batch is another one."""

    def __init__(
        self, rate: float = 0.0, lengths: tuple[int, ...] = (8, 9, 7), places: int = 16,
        net: Callable[[], nn.Module] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        start(partitions=given.partitions, **settings)
        torch.manual_seed(0)
        self.lengths = lengths
        net = Words(rate, places=places) if net is None else net()
        super().__init__(net, next_words, partial(torch.optim.AdamW, lr=0.01, eps=1e-4))

    def batch(self, number: int) -> Tensor:
        return words_of(number, self.lengths[number % len(self.lengths)])

    def cut(self) -> list[str]:
        """The weights that ranks have split, which replicas may share besides."""
        return [name for name, parameter in self.model.local_named_parameters() if "tp" in axes_of(parameter)]

    def regions(self) -> list[str]:
        return [n for n, m in self.model.module.named_modules() if isinstance(vars(m).get("forward"), Region)]


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "gpipe", "zb_h1"):
        job = Job(pipeline=pipeline)
        job.trains_as_one_process()
        if given.partitions == 1:
            split = current.session().settings.tensor_parallel_degree > 1
            assert job.regions() == [*(f"layers.{n}" for n in range(4)), *(["head"] if not split else [])]
            assert len(job.cut()) == (
                4 * 5 + 2 if split else 0
            )  # qkv, out, inner and its bias, outer; words, places
        assert job.regions()


@CHECKS.check
def code_between_layers_may_use_weights() -> None:
    Job(net=Scaled, verify="gradients").trains_as_one_process()


@CHECKS.check
def norms_are_those_of_the_whole_model() -> None:
    job = Job(verify="gradients")
    job.clips_as_one_process()


@CHECKS.check
def norms_have_one_precision_on_all_ranks() -> None:
    for kind in (torch.bfloat16, torch.float64):
        job = Job(net=lambda kind=kind: Words(0.0).to(kind), verify="off")
        job.train(1, max_norm=0.05)
        norms: list[Any] = [None] * weft.size()
        dist.all_gather_object(norms, job.norm)
        assert {norm.dtype for norm in norms} == {kind}
        assert len({float(norm) for norm in norms}) == 1


@CHECKS.check
def layers_may_be_checkpointed() -> None:
    for settings in ({}, {"offload_activations": True}):
        job = Job(verify="gradients", **settings)
        for layer in job.model.module.layers:
            set_activation_checkpointing(layer)
        job.trains_as_one_process()
        assert job.regions()


@CHECKS.check
def gradients_may_be_scaled() -> None:
    job = Job()
    scaler = weft.amp.GradScaler(init_scale=8.0)
    step = step_of(next_words, scaler)
    for number in range(2):
        job.optimizer.zero_grad()
        step(job.model, job.batch(number).chunk(weft.rdp_size())[weft.rdp_rank()])
        scaler.step(job.optimizer)
        scaler.update()
    job.train_alone(2)
    job.compare()


@CHECKS.check
def sequences_that_are_too_short_are_whole() -> None:
    job = Job(lengths=(8, 2, 3))
    job.trains_as_one_process()


@CHECKS.check
def ranks_bring_samples_of_their_own() -> None:
    job = Job(inputs="per_rank")
    for number in range(2):
        job.optimizer.zero_grad()
        job.step(job.model, job.batch(number).chunk(weft.dp_size())[weft.dp_rank()])
        job.optimizer.step()
    job.train_alone(2)
    job.compare()


@CHECKS.check
def layers_hold_their_part_of_what_the_backward_pass_needs() -> None:
    kept: dict[str, int] = {}

    class Counting(Layer):  # without a mask, which a CPU would keep, and GPUs do not need
        def __init__(self) -> None:
            super().__init__(0.0)
            self.causal = False

        def forward(self, x: Tensor) -> Tensor:
            def note(tensor: Tensor) -> Tensor:
                local = getattr(tensor, "to_local", lambda: tensor)().untyped_storage()
                if not any(p.untyped_storage().data_ptr() == local.data_ptr() for p in self.parameters()):
                    kept.setdefault(str(local.data_ptr()), local.nbytes())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return super().forward(x)

    def held(degree: int) -> int:
        net = nn.Sequential(Counting(), Counting())
        model, step = weft.DistributedModel(net), step_of(squares)
        x = torch.randn(2, 512, WIDTH, generator=torch.Generator().manual_seed(0))
        step(model, x)
        kept.clear()
        step(model, x)
        return sum(kept.values())

    weft.init({"microbatches": 1, "verify": "off"})
    parts = held(2)
    torch.manual_seed(0)
    kept.clear()
    layers = [Counting(), Counting()]
    x = torch.randn(2, 512, WIDTH, requires_grad=True)
    layers[1](layers[0](x)).sum().backward()
    whole = sum(kept.values())
    print(f"kept {parts} of {whole} bytes: {parts / whole:.2f}", flush=True)
    assert parts < 0.7 * whole  # halves, and keys and values of all


class Sent:
    """Inside, the bytes that this rank gets from the others for tensors in parts, as rings would send them."""

    def __enter__(self) -> Sent:
        self.bytes: dict[str, float] = {}
        self._before = {
            name: getattr(ShardGroup, name) for name in ("gather", "all_reduce", "reduce_scatter")
        }
        for name, rounds in (("gather", 0), ("all_reduce", 2), ("reduce_scatter", 1)):
            setattr(ShardGroup, name, self._counting(name, rounds))
        return self

    def _counting(self, name: str, rounds: int) -> Any:
        def counted(shard_group: ShardGroup, tensor: Tensor, *how: Any) -> Any:
            share = rounds * (shard_group.size - 1) / shard_group.size if rounds else shard_group.size - 1
            self.bytes[name] = self.bytes.get(name, 0) + share * tensor.nbytes
            return self._before[name](shard_group, tensor, *how)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, method in self._before.items():
            setattr(ShardGroup, name, method)


@CHECKS.check
def results_stay_in_parts_between_layers() -> None:
    job = Job(lengths=(64,), verify="off", places=64)
    job.train(1)
    sequences = Sequences.from_record(job.model.plan.sequences)
    assert sequences.balanced and {"layers.0", "head"} <= {*sequences.kept}, sequences.text()
    sent = []
    for keeps in (True, False):
        for name in job.regions():
            job.model.module.get_submodule(name).__dict__["forward"].keeps = keeps
        with Sent() as counted:
            job.train(1)
        sent.append(sum(counted.bytes.values()))
    print(f"sent {sent}: {sent[0] / sent[1]:.2f}", flush=True)
    assert sent[0] < 0.75 * sent[1]


class Meddling(Words):
    """Between its layers it writes, watches a gradient, and looks at other positions."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.norms: list[float] = []

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        x = self.layers[0](x)
        x += 0.5
        x = self.layers[1](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.norms.append(float(gradient.norm())))
        x = self.layers[2](x)
        x = self.layers[3](x + x.flip(1) + x.mean(1, keepdim=True))
        return self.head(self.norm(x))


@CHECKS.check
def what_is_done_between_layers_is_what_one_process_does() -> None:
    job = Job(verify="gradients", net=Meddling)
    job.train(2)
    job.train_alone(2)
    job.compare()
    sequences = Sequences.from_record(job.model.plan.sequences)
    assert sequences.kept == ("layers.2", "layers.3", "head"), sequences.text()
    assert sequences.notes["layers.0"] == "all-gathered: add writes into it"
    assert sequences.notes["layers.1"] == "all-gathered: register_hook writes into it"
    assert sequences.notes["layers.2"] == "kept sharded, all-gathered for flip, mean"

    @weft.step
    def scores_of(model: nn.Module, words: Tensor) -> Tensor:
        return model(words)[:, 1:]

    words = job.batch(0)
    for each, expected in zip(scores_of(job.model, words).outputs, words.chunk(2), strict=True):
        assert type(each) is Tensor
        torch.testing.assert_close(each, job.alone(expected)[:, 1:], rtol=1e-4, atol=1e-5)


class Turned(Layer):
    """Queries and keys are multiplied by a table of positions, as rotary embeddings are, and written in place."""

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        table = torch.linspace(0.5, 1.5, length)[:, None]
        q, k = q * table, k * table
        q += 0.1 * table
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.outer(F.gelu(self.inner(self.between(x))))


@CHECKS.check
def whole_tensors_beside_parts_cost_nothing() -> None:
    """Also on the threads of microbatches."""

    def net() -> nn.Module:
        words = Words(0.0)
        words.layers = nn.ModuleList(Turned(0.0) for _ in range(2))
        return words

    gathered: list[str] = []
    before = Functions.on_full_tensors

    def counting(functions: Functions, func: Any, args: Any, kwargs: Any, reason: BaseException) -> Any:
        gathered.append(f"{func} {reason!r}")
        return before(functions, func, args, kwargs, reason)

    Functions.on_full_tensors = counting  # type: ignore[method-assign]
    try:
        job = Job(net=net, lengths=(8, 7), verify="off")
        job.train(2)
    finally:
        Functions.on_full_tensors = before  # type: ignore[method-assign]
    assert not gathered, gathered
    job.train_alone(2)
    job.compare()


class Batched(Layer):
    """Attention by products of matrices in batches: samples and heads are one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            each.view(samples, length, HEADS, -1).transpose(1, 2).reshape(samples * HEADS, length, -1)
            for each in self.qkv(self.before(x)).chunk(3, -1)
        )
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.zeros(length, length, dtype=x.dtype, device=x.device).masked_fill(hidden, -1e4)
        weights = torch.baddbmm(
            scores.expand(samples * HEADS, -1, -1), q, k.transpose(1, 2), alpha=0.5
        ).softmax(-1)
        mixed = torch.bmm(weights, v).view(samples, HEADS, length, -1)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, -1))
        return x + self.outer(F.gelu(self.inner(self.between(x))))


class WritingPlaces(Layer):
    """Writes the scores of one position in a later step, or a view of them."""

    late = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.late:
            x = x.clone()
        if self.late == "items":
            x[:, 1] = x[:, 0] * 2
        elif self.late == "view":
            x[:, 1].mul_(2)
        return x


@CHECKS.of_each("items", "view")
def writes_of_some_positions_are_refused(late: str) -> None:
    """PyTorch would write into a copy of them."""
    net = Words(0.0)
    net.layers = nn.ModuleList(WritingPlaces(0.0) for _ in range(2))
    job = Job(net=lambda: net, verify="off", lengths=(8,))
    job.train(1)
    for layer in net.layers:
        layer.late = late
    job.train(1)


@CHECKS.check
def samples_and_heads_may_be_one_dimension() -> None:
    def net() -> nn.Module:
        words = Words(0.0)
        words.layers = nn.ModuleList(Batched(0.0) for _ in range(2))
        return words

    job = Job(net=net, verify="gradients")
    job.trains_as_one_process()
    assert job.regions()


class Writing(Layer):
    """Writes into what three linears share, none of which trains."""

    def __init__(self) -> None:
        super().__init__(0.0)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        for each in (self.q, self.k, self.v):
            each.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        shared = self.before(x)
        q = self.q(shared)
        shared.mul_(2.0)
        pair = q, self.k(shared), self.v(shared)
        heads = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in pair]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.outer(F.gelu(self.inner(self.between(x))))


@CHECKS.check
def what_linears_share_may_be_written_in_between() -> None:
    def net() -> nn.Module:
        words = Words(0.0)
        words.layers = nn.ModuleList(Writing() for _ in range(2))
        return words

    job = Job(net=net, lengths=(8, 7), verify="off")
    assert job.train(2) == pytest.approx(job.train_alone(2), rel=1e-5)
    torch.testing.assert_close(job.model.state_dict(), dict(job.alone.state_dict()), rtol=1e-5, atol=1e-6)


@CHECKS.check
def chance_is_the_same_where_tensors_are_whole() -> None:
    job = Job(rate=0.5)
    torch.manual_seed(weft.rank())  # ranks that do not agree at all
    job.train()
    mine = dict(job.model.local_named_parameters())
    state = job.model.state_dict()
    for name, parameter in sorted(mine.items()):
        cut = is_cut(parameter)
        if not cut:
            torch.testing.assert_close(
                parameter.detach(), state[name.removeprefix("module.")], rtol=0, atol=0
            )
        group = current.session().tensor.sequence_group if cut else weft.get_tp_process_group()
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, parameter.detach().contiguous(), group=group)
        assert all(torch.equal(others[0], each) for each in others), name


@CHECKS.check
def outside_of_steps_a_rank_computes_by_itself() -> None:
    job = Job()
    job.train(1)
    job.train_alone(1)
    if given.partitions == 1 and weft.rank() == 0:
        words = job.batch(0)
        torch.testing.assert_close(job.model.module(words), job.alone(words), rtol=1e-5, atol=1e-6)

    evaluate = weft.step(next_words)
    job.model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            words = job.batch(4)
            mine = evaluate(job.model, words).reduce_mean()
            assert mine.item() == pytest.approx(next_words(job.alone, words).item(), rel=1e-5)


@CHECKS.check
def parameters_may_be_made_late() -> None:
    start(partitions=given.partitions)
    net, alone = made_late(lambda: Words(0.0, width=96))
    assert net.layers[0].qkv.weight.is_meta
    job = training.Job(net, next_words, sgd, words_of, alone=alone, atol=1e-6)
    job.trains_as_one_process()
    regions: list[Any] = [None] * weft.size()
    dist.all_gather_object(
        regions, [n for n, each in net.named_modules() if isinstance(vars(each).get("forward"), Region)]
    )
    assert any(regions), (
        "a rank may have none: measured times decide which layer is opened between partitions"
    )


class Attention(nn.Module):
    """Attention of one kind, with a residual path."""

    def __init__(self, kind: str, heads: int = 4, width: int = 24) -> None:
        super().__init__()
        self.kind, self.heads, self.keys = kind, heads, 2 if kind == "two heads of keys" else heads
        own = width // heads
        self.norm, self.q = nn.LayerNorm(width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, self.keys * own), nn.Linear(width, self.keys * own // 2)
        self.out = nn.Linear(width // 2, width)
        self.bias = nn.Parameter(torch.randn(heads, 8, 8)) if kind == "a bias for each head" else None

    def forward(self, x: Tensor) -> Tensor:
        normed, length = self.norm(x), x.shape[1]
        q, k, v = (
            each(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in ((self.q, self.heads), (self.k, self.keys), (self.v, self.keys))
        )
        mask: Any = None if self.bias is None else self.bias[:, :length, :length]
        if self.kind == "documents":
            document = torch.arange(length, device=x.device) // 3
            mask = document.unsqueeze(1) == document
        causal = mask is None
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=self.keys < self.heads
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class OfAttention(nn.Module):
    """Layers of attention of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 24), nn.Linear(24, WORDS)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Inside, all-to-alls are counted."""
    before = ShardGroup.all_to_all

    def all_to_all(group: ShardGroup, sent: Tensor) -> Tensor:
        calls.append(group.name)
        return before(group, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "all_to_all", all_to_all)
        yield


@CHECKS.check
def attention_takes_own_heads_or_own_positions() -> None:
    taken = {}
    for kind in ("causal", "two heads of keys", "a bias for each head", "documents"):
        for attention in ("all_gather", "all_to_all", "auto"):
            for lengths in ((8,), (7,)):
                calls: list[str] = []
                with counted(calls):
                    job = Job(
                        net=partial(OfAttention, kind), lengths=lengths, context_parallel_attention=attention
                    )
                    job.trains_as_one_process()
                taken[kind, attention, lengths] = bool(calls)
    degree = current.session().settings.context_parallel_degree
    heads = 4 // current.session().settings.tensor_parallel_degree
    for (kind, attention, (length,)), by_heads in taken.items():
        keys = heads // 2 if kind == "two heads of keys" else heads
        fits = length % degree == 0 and keys % degree == 0
        # four tensors twice; two three times to all
        less = 2 * (heads + keys) <= FACTOR * 3 * degree * keys
        # blocks of two see their own documents and what is beside; smaller blocks see more than that
        fits &= kind != "documents" or attention == "all_to_all" or degree > 2
        assert by_heads == (fits and attention != "all_gather" and (attention == "all_to_all" or less)), kind


@CHECKS.check
def saves_go_to_other_layouts() -> None:
    Job().goes_to_other_layouts(given.folder / "saves")


def cut_between(named: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(named, each, strict=True))
        for each in zip(*(t.chunk(parts) for t in named.values()), strict=True)
    ]


def case_trains(case: Case) -> tuple[Any, list[str]]:
    """A model of `transformers` trains as in one process: the model, and its modules whose sequences are cut."""
    gc.collect()
    weft.init({"partitions": given.partitions, "microbatches": 2})
    net: Any = case.build()
    net.config.use_cache = False
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(case.optimizer_for(model.parameters()))
    plain = case.optimizer_for(alone.parameters())

    step = step_of(case.loss_of)
    for number in range(3):
        samples = case.batch(number)
        parts = cut_between(samples, 2 * weft.rdp_size())
        losses = [case.loss_of(alone, part) / len(parts) for part in parts]
        plain.zero_grad()
        for loss in losses:
            loss.backward()
        plain.step()
        optimizer.zero_grad()
        mine = step(model, cut_between(samples, weft.rdp_size())[weft.rdp_rank()])
        optimizer.step()
        own = losses[2 * weft.rdp_rank() : 2 * weft.rdp_rank() + 2]
        assert mine.reduce_mean().item() == pytest.approx(
            sum(loss.item() for loss in own) * len(parts) / 2, rel=1e-5
        )
    layers = [n for n, m in net.named_modules() if isinstance(vars(m).get("forward"), Region)]
    torch.testing.assert_close(model.state_dict(), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    return model, layers


@CHECKS.of_each("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM")
def a_model_trains_as_in_one_process(name: str) -> None:
    _, layers = case_trains(CASES[name])
    heads = current.session().settings.tensor_parallel_degree == 1  # else a head may be cut over other ranks
    assert len(layers) >= (4 + heads if given.partitions == 1 else 2), layers


@CHECKS.check
def models_without_sequences_are_refused() -> None:
    weft.init({"partitions": given.partitions, "microbatches": 2})
    model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    step_of(squares)(model, torch.ones(4, 4))


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
