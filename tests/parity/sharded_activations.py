"""Steps whose tensors stay sharded between cut modules; started by `test_sharded_activations.py`.

    sharded_activations.py --partitions 2 check...       with tensor_parallel_degree, and sequence_parallel, in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests.parity.registry import Checks
from tests.parity.zoo import CASES
from tests.parity.zoo.case import Case
from weft.errors import UsageError
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.session import current
from weft.torch.tensor_parallel import Splits, is_cut
from weft.torch.tensor_parallel.cuts import part_sizes
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensor_parallel.sharded_activations import (
    AllGathered,
    ShardedActivation,
    plain,
    sharded_activation,
)
from weft.torch.tensors.shards import ShardPositions

CHECKS = Checks()
given = CHECKS.given
STEPS, MICROBATCHES = 3, 2
WORDS, WIDTH, LENGTH = 211, 16, 12
Batch = dict[str, Any]


class Block(nn.Module):
    """Norms written by hand and PyTorch's, attention, a gated pair of linears, dropout and sums.

    ``flat``: the pair sees samples and positions as one dimension.
    """

    def __init__(self, rate: float, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.outer, self.dropout = nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(rate)
        self.small = nn.Linear(WIDTH, 3)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm(x)))
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        given = normed.flatten(0, 1) if self.flat else normed
        mixed = self.dropout(self.outer(F.silu(self.gate(given)) * self.inner(given))).view(x.shape)
        return x + mixed * self.small(normed).softmax(-1)[..., :1]


class Words(nn.Module):
    """An embedding, positions, blocks and scores for all words."""

    def __init__(self, tied: bool, rate: float) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(WORDS, WIDTH),
            nn.Parameter(torch.randn(LENGTH, WIDTH) / 4),
        )
        self.blocks = nn.Sequential(*(Block(rate, number == 1) for number in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions[: words.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def words_model(tied: bool, rate: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Words(tied, rate)


def words_batch(number: int) -> Batch:
    numbers = torch.Generator().manual_seed(number)
    return {"words": torch.randint(0, WORDS, (8, LENGTH), generator=numbers)}


def targets(words: Tensor) -> Tensor:
    """The next words, but for some that do not count."""
    return torch.where(words % 7 == 0, -100, words)[:, 1:]


def shifted(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["words"])
    return F.cross_entropy(
        scores[..., :-1, :].contiguous().float().view(-1, WORDS), targets(batch["words"]).reshape(-1)
    )


def capped(model: nn.Module, batch: Batch) -> Tensor:
    scores = 5 * torch.tanh(model(batch["words"]) / 5)
    probabilities = scores[:, :-1].log_softmax(-1)
    loss = F.nll_loss(probabilities.flatten(0, 1), targets(batch["words"]).flatten())
    return loss + 1e-3 * torch.logsumexp(scores, -1).square().mean()


def with_scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = model(batch["words"])
    return F.cross_entropy(
        scores.transpose(1, 2)[..., :-1], targets(batch["words"]), label_smoothing=0.1
    ), scores


def with_metric(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = model(batch["words"])[:, :-1]
    right = scores.argmax(-1) == targets(batch["words"])
    return F.cross_entropy(scores.flatten(0, 1), targets(batch["words"]).flatten()), right.float().mean()


def with_weights(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = model(batch["words"])
    return scores.softmax(-1).square().sum(-1).mean(), scores.amax(-1)


def with_a_write(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = model(batch["words"])
    scores.masked_fill_(torch.arange(WORDS) == 5, -1e4)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), targets(batch["words"]).flatten()), scores


class Counted:
    """How many whole tensors have been put together inside, by the size of their last dimension."""

    def __enter__(self) -> Counted:
        self.sizes: list[int] = []
        self._before = AllGathered.forward

        def forward(
            ctx: Any, part: Tensor, shard_group: Any, along: int, positions: ShardPositions
        ) -> Tensor:
            result = self._before(ctx, part, shard_group, along, positions)
            self.sizes.append(result.shape[-1])
            return result

        AllGathered.forward = staticmethod(forward)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        AllGathered.forward = staticmethod(self._before)  # type: ignore[method-assign]


class Kept:
    """What autograd keeps for the backward pass, but for parameters; memory that tensors share counts once."""

    def __enter__(self) -> Kept:
        self.sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._hooks.__exit__(*details)

    def _note(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not tensor._is_view():
            self.sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a result itself would keep its own graph alive

    def bytes(self) -> int:
        return sum(self.sizes.values())


class Job:
    """A model in parts, and the same in one process."""

    def __init__(
        self, build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Any], **settings: Any
    ) -> None:
        gc.collect()
        weft.init({"partitions": given.partitions, "microbatches": MICROBATCHES, **settings})
        net = build()
        self.loss, self.alone = loss, copy.deepcopy(net)
        self.model = weft.DistributedModel(net)
        self.optimizer = weft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        )
        self.plain = torch.optim.SGD(self.alone.parameters(), lr=0.05, momentum=0.9)

        @weft.step
        def step(model: nn.Module, batch: Batch) -> Any:
            result = loss(model, batch)
            model.backward(result[0] if isinstance(result, tuple) else result)
            return result

        self.step = step

    def splits(self) -> Splits:
        return Splits.from_record(self.model.plan.tensors)

    def compare(self, batches: list[Batch], rtol: float = 1e-5) -> list[list[Any]]:
        """Train both, and compare losses, gradients of all steps, and weights after them.

        Returns what the steps returned for each microbatch: here, and in one process.
        """
        found = []
        for batch in batches:
            self.optimizer.zero_grad()
            self.plain.zero_grad()
            told = self.step(self.model, batch)
            actual = (
                [*zip(*(each.outputs for each in told), strict=True)]
                if isinstance(told, tuple)
                else told.outputs
            )
            expected = []
            for number in range(MICROBATCHES):
                half = {name: value.chunk(MICROBATCHES)[number] for name, value in batch.items()}
                result = self.loss(self.alone, half)
                (result[0] if isinstance(result, tuple) else result).div(MICROBATCHES).backward()
                expected.append(
                    tuple(each.detach() for each in result) if isinstance(result, tuple) else result.detach()
                )
            for mine, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)
            found.append([actual, expected])
            for name, parameter in self.model.local_named_parameters():
                other = self.alone.get_parameter(name.removeprefix("module.")).grad
                mine = None if parameter.grad is None else full_tensor(parameter.grad, parameter)
                torch.testing.assert_close(
                    mine, other, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
                )
            self.optimizer.step()
            self.plain.step()
        state = self.model.state_dict()
        torch.testing.assert_close(state, dict(self.alone.state_dict()), rtol=1e-4, atol=1e-5)
        return found


def of_case(case: Case, **settings: Any) -> Job:
    """A model of `transformers` that computes its loss itself."""
    return Job(
        case.build,
        lambda model, batch: case.loss(model(**batch, use_cache=False, **case.options)),
        **settings,
    )


MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM")


@CHECKS.check
def losses_inside_of_models_are_on_the_parts() -> None:
    for name in MODELS:
        job = of_case(CASES[name], verify="gradients")
        job.compare([CASES[name].batch(step) for step in range(STEPS)])
        assert job.splits().notes["lm_head"] == "loss on the shards", job.splits().text()
        with Counted() as counted:
            job.step(job.model, CASES[name].batch(9))
        assert job.alone.config.vocab_size not in counted.sizes, counted.sizes


@CHECKS.check
def losses_in_steps_are_on_the_parts() -> None:
    """Of a vocabulary that no number of ranks divides."""
    for tied, loss in ((False, shifted), (True, capped)):
        job = Job(partial(words_model, tied), loss, verify="gradients")
        job.compare([words_batch(step) for step in range(STEPS)])
        assert job.splits().notes["head"] == "loss on the shards", job.splits().text()
        with Counted() as counted:
            job.step(job.model, words_batch(9))
        assert WORDS not in counted.sizes, counted.sizes


@CHECKS.check
def scores_that_are_asked_for_are_whole() -> None:
    """Returned, read by a metric, written through a view: always as in one process."""
    for loss, note in (
        (with_scores, "loss on the shards"),
        (with_metric, "loss on the shards, all-gathered for argmax"),
        (with_weights, "logits all-gathered for softmax, amax"),
        (with_a_write, "all-gathered: masked_fill writes into it"),
    ):
        job = Job(partial(words_model, False), loss)
        job.compare([words_batch(step) for step in range(2)])
        assert job.splits().notes["head"] == note, job.splits().text()
        for each in job.step(job.model, words_batch(9)):
            assert not any(isinstance(one, ShardedActivation) for one in each.outputs)


@CHECKS.check
def tokens_are_in_parts_between_regions() -> None:
    for name in MODELS:
        job = of_case(CASES[name], verify="gradients", sequence_parallel=True)
        job.compare([CASES[name].batch(step) for step in range(STEPS)])
        notes = job.splits().notes
        rows = [n for n, linear in job.splits().linears().items() if linear.kind == "row"]
        assert rows and all(notes[row] == "reduce-scattered along tokens" for row in rows), (
            job.splits().text()
        )
        with Counted() as counted:
            job.step(job.model, CASES[name].batch(9))
        assert given.partitions > 1 or not counted.sizes, counted.sizes


@CHECKS.check
def tokens_of_own_models_are_in_parts() -> None:
    for pipeline in ("1f1b", "gpipe", "zb_h1") if given.partitions > 1 else ("1f1b",):
        job = Job(
            partial(words_model, True), shifted, verify="gradients", pipeline=pipeline, sequence_parallel=True
        )
        job.compare([words_batch(step) for step in range(STEPS)])
        notes = job.splits().notes
        for name in ("blocks.0.outer", "embedding"):
            assert notes[name].startswith("reduce-scattered along tokens"), job.splits().text()


@CHECKS.check
def tokens_that_ranks_cannot_divide_are_whole() -> None:
    job = Job(partial(words_model, True), shifted, verify="gradients", sequence_parallel=True)
    batches = [{"words": words_batch(step)["words"][:, : LENGTH - 1]} for step in range(2)]
    job.compare([*batches, words_batch(2)])
    note = f"reduce-scattered along tokens, whole where {weft.tp_size()} ranks cannot divide them ({LENGTH - 1} tokens)"
    assert job.splits().notes["blocks.0.outer"] == note, job.splits().text()


@CHECKS.check
def chance_is_each_part_s_own() -> None:
    losses = []
    for _ in range(2):
        job = Job(partial(words_model, True, 0.5), shifted, sequence_parallel=True)
        torch.manual_seed(weft.rank())  # the first rank decides
        losses.append([job.step(job.model, words_batch(step)).reduce_mean().item() for step in range(2)])
    assert losses[0] == losses[1]
    for name, parameter in job.model.local_named_parameters():
        if not is_cut(parameter):  # their gradients come from all tokens
            mine = parameter.grad.detach().clone()
            other = [torch.empty_like(mine) for _ in range(weft.tp_size())]
            dist.all_gather(other, mine, group=current.session().group("tp"))
            assert all(torch.equal(mine, each) for each in other), name


@CHECKS.check
def tokens_in_parts_take_less_memory() -> None:
    """What the backward pass of a model of blocks keeps on each rank, measured as PyTorch saves it."""
    kept = []
    for sequence in (False, True):
        saved = Kept()

        def loss(model: nn.Module, batch: Batch, saved: Kept = saved) -> Tensor:
            with saved:
                return shifted(model, batch)

        job = Job(partial(words_model, True, 0.1), loss, verify="off", sequence_parallel=sequence)
        for _ in range(2):
            job.step(job.model, words_batch(0))
        kept.append(saved.bytes())
    print(f"kept {kept}", flush=True)
    assert kept[1] < 0.75 * kept[0], kept


def shard_group() -> ShardGroup:
    weft.init({"partitions": given.partitions, "microbatches": 1})
    return ShardGroup.of(current.session().tensor.group, weft.tp_rank(), weft.tp_size(), torch.device("cpu"))


class Squared(torch.autograd.Function):
    """A function of the script's own, below PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def doubled_by_a_view(x: Tensor) -> Tensor:
    sliced = x[:1]
    x.unsqueeze(0).mul_(2.0)
    return sliced.sum(-1, keepdim=True) + x.exp().sum(-1, keepdim=True)


def by_chance(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.native_dropout(x, 0.5, True)[0]


def attended(x: Tensor, w: Tensor) -> Tensor:
    """Attention below PyTorch's functions, which no rule for one of them sees."""
    torch.manual_seed(3)
    shared = torch.outer(w, w).repeat(3, 1), w.repeat(3), None, None, False, 0.5, torch.outer(w, w), w
    sides = [each.transpose(0, 1) for each in (x, x.tanh(), x)]
    return sum(
        F.multi_head_attention_forward(*sides, 7, 1, *shared, training=True, need_weights=needed)[0]
        for needed in (True, False)
    )


NUMBERS = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(5))
ON_TOKENS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, w: (x + NUMBERS) * w - 1 / (x.abs() + 1),
    "norm": lambda x, w: F.layer_norm(x, (7,), w, w * 2) + F.rms_norm(x, (7,), w),
    "linear": lambda x, w: F.linear(x, torch.outer(w, w), w).relu(),
    "view": lambda x, w: (
        x.view(2, 6, 7, 1).transpose(0, 1).reshape(6, 2, -1)[:, :, 1:3].contiguous() * w[1:3]
    ),
    "mean": lambda x, w: x.mean(-1, keepdim=True) * w + x.mean(1, keepdim=True),
    "other tokens": lambda x, w: torch.cumsum(x, 1) * w + x.flip(1) + x[:, :1],
    "function": lambda x, w: Squared.apply(Squared.apply(x * w)) * w,
    "checkpoint": lambda x, w: checkpoint(lambda y: (y * w).tanh(), x * 2, use_reentrant=True) * 2,
    "again": lambda x, w: checkpoint(lambda y: F.layer_norm(y * w, (7,)).tanh(), x * 2, use_reentrant=False),
    "written": lambda x, w: doubled_by_a_view(x * w),
    "chance": lambda x, w: by_chance(x * w) + by_chance(x.transpose(0, 1)).transpose(0, 1),
    "attention": lambda x, w: attended(x * w, w),
}
CLASSES = torch.tensor([[1, 6, 0, -100, 3, 2], [4, 4, -100, 5, 0, 6]])
ON_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, w: F.cross_entropy((x * w).flatten(0, 1), CLASSES.flatten()),
    "sum": lambda x, w: F.cross_entropy(
        x.view(-1, 7), CLASSES.view(-1), reduction="sum", ignore_index=4 - 104
    ),
    "each": lambda x, w: F.cross_entropy(x.transpose(1, 2), CLASSES, reduction="none") * 3,
    "smooth": lambda x, w: nn.CrossEntropyLoss(label_smoothing=0.2)(x.flatten(0, 1), CLASSES.flatten()),
    "weights": lambda x, w: F.cross_entropy(x.view(-1, 7), CLASSES.view(-1), weight=torch.linspace(1, 2, 7)),
    "another ignored": lambda x, w: F.cross_entropy(x.view(-1, 7), CLASSES.clamp(0).view(-1), ignore_index=6),
    "one": lambda x, w: F.cross_entropy(x[0, 0], CLASSES[0, 0]),
    "nll": lambda x, w: F.nll_loss(x.log_softmax(-1).flatten(0, 1), CLASSES.flatten()),
    "logsumexp": lambda x, w: x.logsumexp(-1).square() + torch.logsumexp(x, (2,), keepdim=True).sum(),
    "capped": lambda x, w: 3 * torch.tanh((x + w) / 3),
    "probable": lambda x, w: F.cross_entropy(x.view(-1, 7), NUMBERS.view(-1, 7).softmax(-1)),
    "function": lambda x, w: Squared.apply(x).log_softmax(1) * Squared.apply(x.softmax(-1)),
    "best": lambda x, w: (x.argmax(-1) == CLASSES).float() + x.amax(-1),
    "written": lambda x, w: doubled_by_a_view(x * w),
}
AFTER = CLASSES.flatten()
ON_POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss": lambda x, w: F.cross_entropy((x * w).flatten(0, 1), AFTER),
    "loss of each": lambda x, w: F.cross_entropy(x.view(-1, 7) * w, AFTER, reduction="none"),
    "loss in sum": lambda x, w: F.cross_entropy(x.view(-1, 7) * w, AFTER.clamp(0), reduction="sum", ignore_index=4),
    "shifted": lambda x, w: F.cross_entropy((x * w)[:, :-1].flatten(0, 1), CLASSES[:, 1:].flatten()),
    "shifted by two": lambda x, w: F.cross_entropy((x * w)[..., 1:-1, :].reshape(-1, 7), CLASSES[:, 2:].flatten()),
    "classes second": lambda x, w: F.cross_entropy((x * w).transpose(1, 2), CLASSES, label_smoothing=0.1),
    "weights": lambda x, w: F.cross_entropy(x.flatten(0, 1) * w, AFTER, torch.linspace(1, 2, 7)),
    "nll": lambda x, w: F.nll_loss((x * w).log_softmax(-1).flatten(0, 1), AFTER, torch.linspace(1, 2, 7)),
    "probable": lambda x, w: F.cross_entropy((x * w).view(-1, 7), NUMBERS.view(-1, 7).softmax(-1)),
    "distances": lambda x, w: F.mse_loss(x * w, NUMBERS) + F.l1_loss(x[:, 1:], NUMBERS[:, 1:], reduction="sum"),
    "weighted": lambda x, w: F.mse_loss(x * w, NUMBERS, weight=NUMBERS.exp())
    + F.binary_cross_entropy_with_logits(x * w, NUMBERS.sigmoid(), NUMBERS.exp(), pos_weight=NUMBERS[0, 0].exp()),
    "mean of all": lambda x, w: (x * w).square().mean() + (x[:, :-1] - NUMBERS[:, 1:]).abs().sum() + x.sum(),
    "back": lambda x, w: (x * w).flatten(0, 1).view(2, 6, 7) * (x * w).view(12, 7)[3:9].sum(),
    "one": lambda x, w: x[:, 0] * w + x[:, -1],
}  # fmt: skip


@CHECKS.check
def functions_give_what_they_give_for_the_whole() -> None:
    ranks = shard_group()
    ends = ShardPositions.zigzag(6, 3) if ranks.size == 3 else ShardPositions.zigzag(8, 2).taken(1, 7)
    behind = {
        along: ShardPositions.contiguous(part_sizes(NUMBERS.shape[along], ranks.size)) for along in (1, 2)
    }
    for along, positions, functions in (
        (1, behind[1], ON_TOKENS | ON_POSITIONS), (1, ends, ON_TOKENS | ON_POSITIONS), (2, behind[2], ON_SCORES),
    ):  # fmt: skip
        for name, function in functions.items():
            results = []
            for in_parts in (False, True):
                whole, weight = NUMBERS.clone().requires_grad_(), torch.linspace(0.5, 1.5, 7).requires_grad_()
                given = whole * 1.5
                if in_parts:
                    given = sharded_activation(
                        positions.own(given, along, ranks.rank), ranks, along, positions
                    )
                result = plain(function(given, weight))
                seeds = torch.linspace(-1, 1, result.numel()).view(result.shape)
                result.backward(seeds)
                if in_parts:  # a part's gradient is that of its numbers, and zero for others
                    whole.grad = ranks.all_reduce(whole.grad)
                results.append([result.detach(), whole.grad, weight.grad])
            for one, other in zip(*results, strict=True):
                if one is None:
                    assert other is None
                else:
                    torch.testing.assert_close(
                        other, one, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
                    )


@CHECKS.check
def losses_take_few_bytes_and_16_bits() -> None:
    ranks = shard_group()
    positions = ShardPositions.contiguous(part_sizes(7, ranks.size))
    scores = sharded_activation(positions.own(NUMBERS, -1, ranks.rank), ranks, -1, positions)
    with Counted() as counted:
        F.cross_entropy(scores.flatten(0, 1), CLASSES.flatten())
        ends = ShardPositions.contiguous(part_sizes(6, ranks.size))
        scores = sharded_activation(ends.own(NUMBERS, 1, ranks.rank), ranks, 1, ends)
        F.cross_entropy(scores[:, :-1].flatten(0, 1), CLASSES[:, 1:].flatten())
        (scores[:, 1:] - NUMBERS[:, 1:]).square().mean()
    assert not counted.sizes
    half = NUMBERS.bfloat16()
    scores = sharded_activation(positions.own(half, -1, ranks.rank), ranks, -1, positions)
    expected = F.cross_entropy(half.flatten(0, 1), CLASSES.flatten())
    actual = F.cross_entropy(scores.flatten(0, 1), CLASSES.flatten())
    assert actual.dtype == torch.bfloat16 and abs(actual - expected) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        exact = F.cross_entropy(half.flatten(0, 1), CLASSES.flatten())
        actual = F.cross_entropy(scores.flatten(0, 1), CLASSES.flatten())
    assert actual.dtype == exact.dtype == torch.float32
    torch.testing.assert_close(actual, exact)


@CHECKS.check
def what_parts_cannot_do_is_an_error() -> None:
    ranks = shard_group()
    positions = ShardPositions.contiguous(part_sizes(7, ranks.size))
    part = positions.own(NUMBERS.requires_grad_() * 1, -1, ranks.rank).contiguous()
    scores = sharded_activation(part, ranks, -1, positions)
    with pytest.raises(IndexError, match="none of the 7 classes"):
        F.cross_entropy(scores[0], torch.tensor([7, 0, 0, 0, 0, 0]))
    for asked in (
        lambda: scores.register_hook(print),
        lambda: scores.retain_grad(),
        lambda: torch.autograd.grad(scores.sum(), [scores]),
    ):
        with pytest.raises(
            UsageError, match=r"keep the module that gives it whole, weft\.set_tensor_parallelism"
        ):
            asked()
    with pytest.raises(UsageError, match=r"write into a copy: x\.clone\(\)"):
        scores.mul_(2.0)
    with pytest.raises(UsageError, match=r"write into a copy: x\.clone\(\)"):
        scores[0] = 1.0
    assert scores.shape == (2, 6, 7) and scores.is_contiguous() and len(scores) == 2
    torch.testing.assert_close(scores.tolist(), NUMBERS.tolist())
    NUMBERS.requires_grad_(False)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
