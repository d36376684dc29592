"""Steps of models whose weights are cut over ranks; started by `test_in_parts.py`.

    in_parts.py --folder FOLDER --partitions 2 check...       with tensor_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models, training
from tests.parity.registry import Checks
from tests.parity.tensor_parallel_models import WIDTH as WIDE
from tests.parity.tensor_parallel_models import Routed, Stacked
from tests.training import STEPS, made_late, next_rows, next_words, own_loss, sgd, squares, start, step_of
from weft.errors import DivergenceError, PeerError, UsageError
from weft.torch.tensor_parallel import axes_of, is_cut

CHECKS = Checks()
ROWS, WIDTH, WORDS = 8, 12, 211
given = CHECKS.given


Block = partial(models.Block, WIDTH, 3 * WIDTH, torch.tanh)
"""Two linears that can be cut, between a norm and a sum, which cannot."""


def network(rate: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(rate=rate) for _ in range(4)))


def batch(number: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(number))


BY_HAND: list[tuple[Any, Any]] = [("column", "row"), ("column", False), ("row", "column"), ("row", "row")]
"""What the script says of the linears of each block."""


class Job(training.Job):
    """Blocks that are cut over ranks, and the same in one process."""

    loss_of = staticmethod(next_rows)

    def __init__(
        self, rate: float = 0.0, places: bool = True, by_hand: bool = False, **settings: Any
    ) -> None:
        placed = {"auto_partition": False, "default_partition": 0} if places else {}
        start(partitions=given.partitions, **placed, **settings)
        net = network(rate)
        for block, words in zip(net, BY_HAND if by_hand else (), strict=False):
            weft.set_tensor_parallelism(block.get_submodule("up"), words[0])
            weft.set_tensor_parallelism(block.get_submodule("down"), words[1])
        alone = copy.deepcopy(net)
        for number in range(4) if places else ():
            weft.set_partition(net[number], number * given.partitions // 4)
        super().__init__(net, next_rows, alone=alone)

    def batch(self, number: int) -> Tensor:
        return batch(number)

    def cut(self) -> list[str]:
        """The weights that ranks have split, which replicas may share besides."""
        named = self.model.local_named_parameters()
        return [name for name, parameter in named if "tp" in axes_of(parameter)]


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "gpipe", "zb_h1"):
        job = Job(pipeline=pipeline)
        job.trains_as_one_process()
        assert len(job.cut()) == 3 * 4 // given.partitions  # up with its bias, and down


@CHECKS.check
def a_step_inside_of_autocast_knows_the_cut_weights() -> None:
    """Casts of autocast from before the weights were cut are not theirs."""
    job = Job(places=False)
    with torch.autocast("cpu", torch.bfloat16):
        job.train(1)
        job.train_alone(1)
    assert job.cut()
    torch.testing.assert_close(job.norm, job.norm_alone, rtol=0.02, atol=0.0)


@CHECKS.check
def a_parameter_that_the_forward_pass_writes_is_written_by_the_step_alone() -> None:
    job = Job(places=False, verify="off")
    average = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    job.model.module[3].average = average

    def halve(*_: Any) -> None:
        with torch.no_grad():
            average.mul_(0.5)

    job.model.module[3].norm.register_forward_pre_hook(halve)
    job.train(1)
    if job.model.is_local("3.average"):
        assert torch.equal(average, torch.full((WIDTH,), 0.25))


@CHECKS.check
def linears_are_cut_as_the_script_says() -> None:
    expected = {
        "0.up.weight", "0.up.bias", "0.down.weight", "1.up.weight", "1.up.bias", "2.up.weight",
        "2.down.weight", "2.down.bias", "3.up.weight", "3.down.weight",
    }  # fmt: skip
    for sequence in (False, True):
        job = Job(by_hand=True, verify="gradients", sequence_parallel=sequence)
        job.trains_as_one_process()
        mine = {name.removeprefix("module.") for name in job.cut()}
        assert mine == {name for name in expected if job.model.is_local(name)}
        assert 3 <= len(mine) <= 10
        notes = job.model.plan.tensors["notes"]
        assert notes["1.up"] == "as the script says, all-gathered"
        assert notes["3.down"].startswith("as the script says" + ", reduce-scattered along tokens" * sequence)
    folder = given.folder / "by_hand"
    weft.save_checkpoint(folder, "three", model=job.model, optimizer=job.optimizer)
    state = copy.deepcopy(job.model.state_dict())
    losses = job.train(1)
    again = Job(by_hand=True)
    weft.resume_from_checkpoint(folder, "three", model=again.model, optimizer=again.optimizer)
    torch.testing.assert_close(again.model.state_dict(), state, rtol=0, atol=0)
    again.steps = STEPS
    assert again.train(1) == pytest.approx(losses, rel=1e-5)


@CHECKS.check
def what_cannot_be_cut_as_the_script_says_is_an_error() -> None:
    weft.init({"microbatches": 1})
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH))
    weft.set_tensor_parallelism(net[0], "column")
    model = weft.DistributedModel(net)
    step_of(squares)(model, batch(0))


@CHECKS.check
def a_rank_holds_its_part_of_weights_and_states() -> None:
    job = Job()
    job.train(1)
    ranks = weft.tp_size() * given.partitions
    cut = 4 * (2 * 3 * WIDTH * WIDTH + 3 * WIDTH) / ranks
    kept = 4 * 3 * WIDTH / given.partitions  # the norms, and the biases of down
    assert sum(p.numel() for p in job.model.local_parameters()) == cut + kept
    states = [s for entry in job.optimizer.optimizer.state.values() for s in entry.values()]
    assert sum(s.numel() for s in states if s.dim()) == 2 * (cut + kept)


@CHECKS.check
def norms_are_those_of_the_whole_model() -> None:
    job = Job()
    job.clips_as_one_process()


@CHECKS.check
def gradients_are_compared_with_one_process() -> None:
    job = Job(verify="gradients")
    job.train(1)


@CHECKS.check
def a_whole_state_is_loaded_into_parts() -> None:
    job = Job()
    state = job.gives_its_states_to(Job)
    with pytest.raises(UsageError, match=r"0\.up\.weight has the shape \[3, 3\], the model needs \[36, 12\]"):
        job.model.load_state_dict({**state, "0.up.weight": torch.zeros(3, 3)})


@CHECKS.check
def chance_is_the_same_where_tensors_are_whole() -> None:
    job = Job(rate=0.5)
    torch.manual_seed(weft.rank())  # ranks that do not agree at all
    losses = job.train()
    state = {name: value for name, value in job.model.state_dict().items()}
    for name, parameter in job.model.local_named_parameters():
        if not is_cut(parameter):  # equal on the ranks that split the others
            torch.testing.assert_close(
                parameter.detach(), state[name.removeprefix("module.")], rtol=0, atol=0
            )
    again = Job(rate=0.5)
    torch.manual_seed(weft.rank() + 1)
    assert again.train() != losses  # the first rank decides, and was seeded otherwise


@CHECKS.check
def other_batches_are_an_error() -> None:
    job = Job()
    job.train(1)
    with pytest.raises(
        DivergenceError, match=r"weft\.rdp_rank\(\) of weft\.rdp_size\(\), not by weft\.dp_rank"
    ):
        job.step(job.model, batch(weft.tp_rank()))


@CHECKS.check
def ranks_bring_samples_of_their_own() -> None:
    job = Job(inputs="per_rank")
    for number in range(2):
        job.optimizer.zero_grad()
        mine = batch(number).chunk(weft.dp_size())[weft.dp_rank()]
        outputs = job.step(job.model, mine)
        job.optimizer.step()
    assert len(outputs.outputs) == 2 and weft.dp_size() == weft.tp_size()
    job.train_alone(2)
    job.compare()
    with pytest.raises(DivergenceError, match="batches of other shapes"):
        job.step(job.model, batch(3)[: 2 + 2 * weft.tp_rank()])
    with pytest.raises(UsageError, match="needs a gradient"):
        job.step(job.model, batch(3).requires_grad_())


@CHECKS.check
def weights_that_a_step_reads_itself_must_be_whole() -> None:
    job = Job(verify="off")

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        return next_rows(model, x) + 0.1 * job.model.module[0].up.weight.square().sum()

    with pytest.raises(
        UsageError, match=r"set_tensor_parallelism\(module, False\)|lost its connection|failed"
    ):
        step_of(penalised)(job.model, batch(0))


class Viewing(models.Block):
    """From the second step on it writes a piece of what its linear gives."""

    late = False

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH, torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.late:
            hidden[..., 3].zero_()
        return x + self.down(hidden)


@CHECKS.of_each("step", "evaluation")
def a_write_into_a_piece_that_only_a_later_one_takes_is_an_error(later: str) -> None:
    """The piece is of another rank, so what is written is a copy."""
    start(partitions=1, verify="off")
    net = nn.Sequential(*(Viewing() for _ in range(2)))
    model = weft.DistributedModel(net)
    step_of(next_rows)(model, batch(0))
    for each in net:
        each.late = True
    with pytest.raises(UsageError, match=r"getitem has taken a piece|lost its connection|failed"):
        if later == "step":
            step_of(next_rows)(model, batch(1))
        with torch.inference_mode():
            weft.step(next_rows)(model, batch(1))


class Reading(models.Block):
    """In evaluation it takes a matrix that is its linear's, which no run in training shows."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH, torch.tanh)
        self.read: Callable[[Reading], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for weight in (
            self.up.weight,
            next(self.up.parameters()),
        ):  # what is the same for a part may be asked
            assert (weight.dtype, weight.device, weight.dim(), weight.requires_grad) == (
                x.dtype,
                x.device,
                2,
                True,
            )
        if self.read is not None:
            self.read(self)
        return super().forward(x)


READS: list[Callable[[Reading], object]] = [
    lambda block: block.up.weight.square().sum(),
    lambda block: block.up.bias + 1,
    lambda block: block.down.weight.T,
    lambda block: block.up.weight.shape,
    lambda block: len(block.up.weight),
    lambda block: block.up.weight.nbytes,
    lambda block: torch.numel(block.up.weight),
    lambda block: block.up.weight.grad,
    lambda block: torch.cat([block.up.weight]),
    lambda block: sum(weight.square().sum() for weight in block.parameters()),
    lambda block: [buffer.norm() for buffer in block.state_dict().values()],
    lambda block: block.up.get_parameter("weight").detach(),
]


@CHECKS.check
def weights_that_another_module_reads_must_be_whole() -> None:
    weft.init({"microbatches": 1})
    block = Reading()
    model = weft.DistributedModel(nn.Sequential(block, nn.Linear(WIDTH, WIDTH)))

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if model.training:
            model.backward(loss)
        return loss

    step(model, batch(0))
    assert block.up.weight is dict(model.module.named_parameters())["0.up.weight"]
    assert block.up.weight.shape[0] == 3 * WIDTH // weft.tp_size()

    def read_all(block: Reading) -> None:
        for read in READS:
            with pytest.raises(UsageError, match=r"reads its weight, a part of shape \["):
                read(block)
        asked.append(len(READS))

    asked: list[int] = []
    model.eval()
    block.read = read_all
    with torch.no_grad():
        step(model, batch(1))
    assert len(asked) == 1
    block.read = READS[0]
    with torch.no_grad(), pytest.raises(UsageError, match=r"reads its weight, a part of shape \["):
        step(model, batch(1))


@CHECKS.check
def saves_go_to_other_layouts() -> None:
    Job().goes_to_other_layouts(given.folder / "saves")


class WordsJob(training.Job):
    """A model of words, whose number is odd, so that ranks have uneven parts of it."""

    def __init__(self, tied: bool, **settings: Any) -> None:
        start(partitions=given.partitions, **settings)
        torch.manual_seed(0)
        blocks = [nn.Dropout(0.0), *(Block(rate=0.0) for _ in range(4))]
        super().__init__(models.Words(WORDS, WIDTH, blocks, tied, padding_idx=3), next_words)

    def batch(self, number: int) -> Tensor:
        return words_of(number)


def words_of(number: int) -> Tensor:
    words = torch.randint(0, WORDS, (ROWS, 5), generator=torch.Generator().manual_seed(number))
    words[:, 0] = 3  # the one whose row gets no gradient
    return words


@CHECKS.check
def vocabularies_are_cut() -> None:
    for tied in (False, True):
        job = WordsJob(tied, verify="gradients")
        job.trains_as_one_process(max_norm=0.05)
        mine = dict(job.model.local_named_parameters())
        rows = [WORDS // weft.tp_size() + (weft.tp_rank() < WORDS % weft.tp_size())]
        found = [
            list(mine[name].shape)[:1] for name in mine if name.endswith(("embed.weight", "head.weight"))
        ]
        assert all(each == rows for each in found) and (found or given.partitions > 1), (found, rows)
        job.compare_gradients()


@CHECKS.check
def a_transformer_is_halved() -> None:
    """GPT-2 with its own proportions, a sixteenth as wide: the vocabulary is a third of its weights."""
    import transformers

    weft.init({"partitions": given.partitions, "microbatches": 2})
    config = transformers.GPT2Config(
        vocab_size=50257 // 16, n_embd=48, n_head=6, n_layer=12, n_positions=64, use_cache=False
    )
    net = transformers.GPT2LMHeadModel(config)
    total = sum(parameter.nbytes for parameter in net.parameters())
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = step_of(own_loss)
    step(model, torch.randint(0, config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)))
    optimizer.step()
    held = sum(parameter.nbytes for parameter in model.local_parameters())
    states = [s for entry in optimizer.optimizer.state.values() for s in entry.values() if s.dim()]
    assert held <= 0.55 * total, held / total
    assert sum(state.nbytes for state in states) <= 0.55 * 2 * total
    print(f"weights {held / total:.4f}, states {sum(s.nbytes for s in states) / (2 * total):.4f}", flush=True)


@CHECKS.check
def a_transformer_is_made_late() -> None:
    """A mixture of experts of `transformers`, which asks whether values can be read, with a row for padding."""
    import transformers

    weft.init({"partitions": given.partitions, "microbatches": 2})
    config = transformers.MixtralConfig(
        vocab_size=600, hidden_size=32, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    net, alone = made_late(lambda: transformers.MixtralForCausalLM(config))
    for each in (net, alone):
        each.set_experts_implementation("batched_mm")
    assert net.model.layers[0].mlp.experts.gate_up_proj.is_meta
    model = weft.DistributedModel(net)
    step = step_of(own_loss)
    words = torch.randint(1, 600, (4, 8), generator=torch.Generator().manual_seed(0))
    loss = step(model, words).reduce_mean().item()
    assert loss == pytest.approx(alone(words, labels=words).loss.item(), rel=1e-5)
    mine = dict(model.local_named_parameters())
    assert all(is_cut(mine[name]) for name in mine if "experts" in name) and any(
        "experts" in name for name in mine
    )


@CHECKS.check
def vocabularies_go_to_other_layouts() -> None:
    WordsJob(True).goes_to_other_layouts(given.folder / "words")


@CHECKS.check
def unknown_words_are_an_error() -> None:
    job = WordsJob(True)
    job.train(1)
    with pytest.raises((IndexError, PeerError), match="out of range"):  # a late rank hears of the other's
        job.step(job.model, torch.full((ROWS, 5), WORDS))
    torch.distributed.barrier()  # who ends first would end the other's step


class Experts(nn.Module):
    """A router and experts whose weights are one tensor, large enough to be made late, between a norm and a sum."""

    def __init__(self, inner: int, how: str) -> None:
        super().__init__()
        self.norm, self.routed = nn.LayerNorm(WIDE), Routed(Stacked(inner=inner, how=how))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(self.norm(x))


def language_models() -> Iterator[Any]:
    """Models of `transformers` that generate."""
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 211, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0, "use_cache": False}
    yield transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=32, **common)
    )
    yield transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **common
        )
    )
    yield transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **common
        )
    )


@CHECKS.check
def language_models_generate_in_and_outside_of_steps() -> None:
    for net in language_models():
        weft.init({"partitions": given.partitions, "microbatches": 1})
        alone = copy.deepcopy(net).eval()
        model = weft.DistributedModel(net)
        step = step_of(own_loss)

        @weft.step
        def generated(model: Any, words: Tensor) -> Tensor:
            with torch.no_grad():
                return model.module.generate(words, max_new_tokens=4, do_sample=False)

        words = torch.randint(2, 211, (4, 5), generator=torch.Generator().manual_seed(0))
        expected = alone.generate(words, max_new_tokens=4, do_sample=False)
        step(model, words)
        model.eval()
        (found,) = generated(model, words).outputs
        assert torch.equal(found, expected), type(net)
        if given.partitions == 1:
            for cached in (False, True):
                found = net.generate(words, max_new_tokens=4, do_sample=False, use_cache=cached)
                assert torch.equal(found, expected), (type(net), cached)
            with torch.no_grad():
                more = {"decoder_input_ids": words} if net.config.is_encoder_decoder else {}
                torch.testing.assert_close(
                    net(words, **more).logits, alone(words, **more).logits, rtol=1e-4, atol=1e-5
                )
        gc.collect()


@CHECKS.check
def a_cut_module_that_a_step_calls_by_itself_is_refused() -> None:
    job = Job()
    job.train(1)

    @weft.step
    def up_alone(model: Any, x: Tensor) -> Tensor:
        return model.module[0].up(x)

    with pytest.raises(UsageError, match="0.up is cut over ranks, and the step's code calls it by itself"):
        up_alone(job.model, batch(0))
    torch.distributed.barrier()  # who ends first would end the other's step


@CHECKS.check
def experts_are_cut() -> None:
    for late in (False, True):
        inner, how = (160, "all") if late else (20, "")
        start(partitions=given.partitions)
        net, alone = made_late(lambda i=inner, h=how: nn.Sequential(*(Experts(i, h) for _ in range(4))), late)
        assert net.get_parameter("0.routed.experts.up").is_meta == late
        job = training.Job(net, next_rows, sgd, lambda number: batch(number, 5, WIDE), alone=alone, atol=1e-6)
        job.trains_as_one_process(max_norm=0.5)
        for name, parameter in job.model.local_named_parameters():
            stacked = name.endswith((".up", ".down", ".up_bias"))
            assert is_cut(parameter) == stacked, name
            expected = alone.get_parameter(name.removeprefix("module."))
            assert parameter.numel() == expected.numel() / (weft.tp_size() if stacked else 1)


class Late(nn.Module):
    """Wide enough for parameters that are made late; the layers' own numbers, so an order of making would show."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64, padding_idx=3)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
        self.again = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
        self.places = nn.Parameter(torch.randn(300, 64))
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.orthogonal_(self.up.weight)
        self.up.weight.marked = True  # type: ignore[attr-defined]

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.places[: words.shape[1]]
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x + self.again(x))


@CHECKS.check
def parameters_made_late_become_parts() -> None:
    start(partitions=given.partitions)
    _, alone = made_late(Late)
    torch.manual_seed(weft.rank())  # the first rank's numbers count
    with weft.delay_param_initialization():
        net = Late()
    assert net.up.weight.is_meta and net.places.is_meta
    job = training.Job(net, next_words, sgd, words_of, alone=alone, atol=5e-6)
    job.trains_as_one_process()
    named = job.model.local_named_parameters()
    mine_cut = {name for name, parameter in named if is_cut(parameter) and parameter.dim() > 1}
    assert mine_cut <= {"module.embedding.weight", "module.up.weight", "module.down.weight",
                        "module.again.0.weight", "module.again.2.weight"}  # fmt: skip
    assert mine_cut and (given.partitions > 1 or len(mine_cut) == 5)
    assert not job.model.is_local("up.weight") or net.up.weight.marked


@CHECKS.check
def automatic_splits_and_schedules_fit() -> None:
    job = Job(places=False, pipeline="auto")
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert job.cut()


@CHECKS.check
def whole_gradients_come_from_all_ranks() -> None:
    job = Job()
    job.train(1)
    job.train_alone(1)
    job.compare_gradients()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
