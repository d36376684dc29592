"""Steps of mixtures whose experts replicas share, rows going to theirs and back; started by `test_expert_parallel.py`.

    expert_parallel.py --folder FOLDER --partitions 2 check...       with expert_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests.parity import experts
from tests.parity.experts import Layer
from tests.parity.registry import Checks
from tests.parity.tensor_parallel_models import WIDTH, Mixture, Residual, Routed, Shared, Sorted, Stacked
from tests.training import ByAllGradients
from weft.errors import UsageError
from weft.torch.delayed_parameters import materialise
from weft.torch.session import current
from weft.torch.tensor_parallel import Splits, axes_of, is_cut

CHECKS = Checks()
given = experts.given = CHECKS.given
LENGTH = experts.LENGTH


class ByExpert(nn.Module):
    """All rows go to all experts, those of the first expert first, times what the router gives them."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, number), InBlocks(number)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        chances = self.router(flat).softmax(-1)
        best, which = chances.topk(2, -1)
        scores = torch.zeros_like(chances).scatter(1, which, best)
        rows = flat.repeat(chances.shape[1], 1) * scores.T.reshape(-1, 1)
        return self.experts(rows).view(chances.shape[1], *flat.shape).sum(0).view(x.shape)


class InBlocks(nn.Module):
    """Experts whose rows come as blocks of the same size."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, WIDTH, 40) * 0.2)
        self.down = nn.Parameter(torch.randn(number, 40, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.view(self.up.shape[0], -1, x.shape[-1])
        return torch.bmm(torch.tanh(torch.bmm(blocks, self.up)), self.down).view(-1, x.shape[-1])


class ToAll(nn.Module):
    """Every row goes to all experts, with scores for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Dense()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return self.experts(flat, self.router(flat).softmax(-1)).view(x.shape)


class Dense(nn.Module):
    """Experts that compute all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *shape) * 0.2) for shape in ((WIDTH, 40), (40, WIDTH))
        )

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        made = torch.einsum("rw,ewi->rei", x, self.up).tanh()
        return torch.einsum("rei,eiw,re->rw", made, self.down, scores)


def network() -> nn.Sequential:
    """Experts that are modules, with a shared one and without; in one weight, with rows in several orders."""
    torch.manual_seed(0)
    mixtures = [Shared(), Mixture(), Routed(Stacked(experts=3), 3), ByExpert(), ToAll(), Residual()]
    return nn.Sequential(*map(Layer, mixtures))


SHARED = [
    "0.mixture",
    "1.mixture",
    "2.mixture.experts",
    "3.mixture.experts",
    "4.mixture.experts",
    "5.mixture",
]


class Job(experts.Job):
    """The same for replicas."""

    def __init__(self, net: nn.Module | None = None, alone: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(net or network(), alone, **settings)

    def shared(self) -> list[str]:
        return [*Splits.from_record(self.model.plan.experts).linears()]


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "zb_h1", "interleaved_1f1b")[: 2 * given.partitions - 1]:
        job = Job(pipeline=pipeline)
        assert job.train(max_norm=0.5) == pytest.approx(job.train_alone(max_norm=0.5), rel=1e-5)
        assert job.shared() == SHARED[: len(job.shared())] == SHARED
        assert float(job.norm) == pytest.approx(float(job.norm_alone), rel=1e-5)
        job.compare()


@CHECKS.check
def norms_of_all_kinds_are_those_of_the_whole() -> None:
    Job().has_norms_of_one_process()


@CHECKS.check
def a_rank_holds_its_experts() -> None:
    job = Job()
    job.train(1)
    degree = Splits.from_record(job.model.plan.experts).size
    for name, parameter in job.model.local_named_parameters():
        whole = job.alone.get_parameter(name.removeprefix("module."))
        is_expert = ".experts." in name and not name.endswith("2.mixture.experts.scale")
        assert is_cut(parameter) == is_expert, name
        if is_expert:
            assert axes_of(parameter) == {"rdp"}
            assert abs(parameter.numel() - whole.numel() / degree) < whole.numel()
    held = sum(p.numel() for p in job.model.local_parameters() if is_cut(p))
    names = [name.removeprefix("module.") for name, p in job.model.local_named_parameters() if is_cut(p)]
    assert held < 0.75 * sum(job.alone.get_parameter(name).numel() for name in names)


@CHECKS.check
def a_whole_state_is_loaded_into_parts() -> None:
    Job().gives_its_states_to(Job)


@CHECKS.check
def saves_go_to_other_layouts() -> None:
    """The first layout saves, and trains on; all others go on from there as it did."""
    folder = given.folder / "saves"
    first = not (folder / "newest").exists()
    job = Job()
    if first:
        job.train(2)
        weft.save_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
        job.train(2)
        torch.save(job.model.state_dict(), given.folder / f"after-{weft.rank()}.pt")
        return
    weft.resume_from_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
    job.steps = 2
    job.train(2)
    state = torch.load(given.folder / "after-0.pt")
    torch.testing.assert_close(job.model.state_dict(), state, rtol=1e-5, atol=1e-6)


@CHECKS.check
def experts_that_nobody_chooses_stay_as_they_are() -> None:
    """Replicas choose unlike experts, and some are chosen by none: these have no gradient, so no decay either."""
    torch.manual_seed(0)
    net = nn.Sequential(Layer(Mixture()), Layer(Routed(Stacked())), Layer(Mixture(named=True)))
    for layer in (net[0], net[2]):
        with torch.no_grad():
            layer.mixture.router.weight.mul_(0.01)
            layer.mixture.router.bias.copy_(torch.tensor([9.0, 0.0, -9.0, -9.0]))
    job = Job(net)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert job.shared() == ["0.mixture", "1.mixture.experts", "2.mixture"]
    job.compare()


class Masked(Mixture):
    """Words whose first number is negative, padding say, go to no expert."""

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.router(x).softmax(-1).max(-1)
        which = which.where(x[..., 0] > 0, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples, words = torch.where(which == number)
            if len(samples):
                result = result.index_put(
                    (samples, words), expert(x[samples, words]) * best[samples, words, None]
                )
        return x + result


@CHECKS.check
def a_replica_may_send_no_rows() -> None:
    """All of its words are masked, in one microbatch or in all; then those of all replicas are."""
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(WIDTH, WIDTH), Masked(), nn.Linear(WIDTH, WIDTH), Masked()))
    for net in (job.model.module, job.alone):
        for linear in (net[0], net[2]):
            with torch.no_grad():
                linear.weight[0] = 0.0
                linear.weight[0, 0] = 1.0
                linear.bias[0] = 0.0
    assert job.train(1) == pytest.approx(job.train_alone(1), rel=1e-5)
    assert job.shared() == ["1", "3"]
    for number, masked in enumerate([slice(0, 4), slice(4, 6), slice(0, 8)]):
        x = job.batch(number)
        x[..., 0] = x[..., 0].abs() + 1.0
        x[masked, :, 0] *= -1
        job.optimizer.zero_grad()
        job.plain.zero_grad()
        job.step(job.model, x.chunk(weft.rdp_size())[weft.rdp_rank()])
        job.loss_of(job.alone, x).backward()
        job.optimizer.step()
        job.plain.step()
    job.compare()


class Counting(Mixture):
    """A router without a loss: a buffer, which each call writes, lets experts be chosen alike (arXiv 2408.15664)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(4))
        self.calls, self.chosen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.chosen.append(self.calls)
        which = (self.router(x).sigmoid() + self.bias).argmax(-1)
        if self.training:
            counts = torch.bincount(which.flatten(), minlength=4)
            self.bias += 0.01 * (counts.float().mean() - counts).sign()
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples, words = torch.where(which == number)
            if len(samples):
                result = result.index_put((samples, words), expert(x[samples, words]))
        return result


@CHECKS.check
def what_a_mixture_writes_is_written_once() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(*(Layer(Counting()) for _ in range(2))))
    job.train(2)
    assert job.shared() == ["0.mixture", "1.mixture"]
    for layer in job.model.module:
        if job.model.is_local("0.norm.weight") and layer is job.model.module[0]:
            assert layer.mixture.calls == 4 and layer.mixture.chosen == [1, 2, 3, 4]
            assert float(layer.mixture.bias.abs().max()) <= 0.04 + 1e-6


@CHECKS.check
def replicas_may_have_unlike_numbers_of_samples() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(Layer(Mixture()), Layer(Routed(Stacked())), Layer(ByExpert())))
    rows = 2 * (1 + weft.rdp_rank())
    first = sum(2 * (1 + rank) for rank in range(weft.rdp_rank()))
    x = torch.randn(64, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))
    job.step(job.model, x[first : first + rows])
    start, losses = 0, []
    for rank in range(weft.rdp_size()):
        end = start + 2 * (1 + rank)
        losses.append(job.loss_of(job.alone, x[start:end]))
        start = end
    (sum(losses) / len(losses)).backward()
    job.optimizer.step()
    job.plain.step()
    job.compare()


@CHECKS.check
def replicas_meet_new_shapes_at_other_times() -> None:
    """One waits for what is known of the shapes of a module's result where another one knows them."""
    torch.manual_seed(0)
    job = Job(
        nn.Sequential(*(Layer(Mixture()) for _ in range(2)), *(Layer(Routed(Stacked())) for _ in range(2)))
    )
    lengths = [3, 5, 3, 7, 5, 5, 2, 7]
    for number, length in enumerate(lengths):
        own = length if weft.rdp_rank() % 2 else lengths[number - 1]
        job.step(job.model, torch.randn(4, own, WIDTH, generator=torch.Generator().manual_seed(number)))


@CHECKS.check
def frozen_experts_let_gradients_through() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(Mixture()), Layer(Routed(Stacked())))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(".experts." not in name and "1.mixture.router" not in name)
    job = Job(net)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    job.compare()


@CHECKS.check
def the_first_layer_has_nothing_below_it() -> None:
    """What goes into the first experts needs no gradient, and half of them are frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(Mixture(), Routed(Stacked()))
    for number in (0, 3):
        net[0].experts[number].requires_grad_(False)
    net[0].router.requires_grad_(False)
    job = Job(net)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert job.shared() == ["0", "1.experts"]
    job.compare()


class Again(nn.Module):
    """Runs a module again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@CHECKS.check
def activation_checkpoints_send_rows_again() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(Again(Layer(each)) for each in (Mixture(), Routed(Stacked()), Shared(), ByExpert()))
    )
    for pipeline in ("1f1b", "zb_h1")[: given.partitions]:
        job = Job(copy.deepcopy(net), pipeline=pipeline)
        assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
        assert len(job.shared()) == 4
        job.compare()


class Rounded(Mixture):
    """Gives what it was given in the same precision."""

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples, words = torch.where(which == number)
            if len(samples):
                found = expert(x[samples, words]) * best[samples, words, None]
                result = result.index_put((samples, words), found.to(x.dtype))
        return result


@CHECKS.check
def autocast_rounds_as_in_one_process() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(Layer(Rounded()), Layer(Rounded()), Layer(ByExpert())))
    with torch.autocast("cpu", torch.bfloat16):
        assert job.train(1) == pytest.approx(job.train_alone(1), rel=0.02)
    assert job.shared() == ["0.mixture", "1.mixture", "2.mixture.experts"]
    torch.testing.assert_close(job.norm, job.norm_alone, rtol=0.02, atol=0.0)


@CHECKS.check
def steps_without_averages_add_up() -> None:
    job = Job(verify="off")
    x = job.batch(0)
    job.optimizer.zero_grad()
    with job.model.no_sync():
        job.step(job.model, x.chunk(weft.rdp_size())[weft.rdp_rank()])
    job.step(job.model, job.batch(1).chunk(weft.rdp_size())[weft.rdp_rank()])
    (job.loss_of(job.alone, x) + job.loss_of(job.alone, job.batch(1))).backward()
    job.optimizer.step()
    job.plain.step()
    job.compare()


@CHECKS.check
def experts_made_late_are_only_those_of_the_rank() -> None:
    """Also in the first step, and with the numbers of one process; then it trains as that does."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        with weft.delay_param_initialization():
            nets.append(nn.Sequential(*(Layer(Routed(Stacked(inner=160, how="all"))) for _ in range(2))))
    net, alone = nets
    weft.init({"partitions": given.partitions, "microbatches": 2})
    materialise(alone, lambda name: True, torch.device("cpu"), current.session().streams)
    job = Job(net, alone)
    made = []
    handle = job.model.register_post_partition_hook(
        lambda model, _: made.append(sum(each.nbytes for each in model.local_parameters()))
    )
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    handle.remove()
    assert job.shared() == ["0.mixture.experts", "1.mixture.experts"]
    whole = sum(each.nbytes for each in alone.parameters()) / given.partitions
    assert made[0] < 0.6 * whole, (made, whole)
    job.compare()


@CHECKS.check
def an_optimizer_that_looks_at_whole_weights_updates_experts() -> None:
    """Adafactor takes norms of a weight, and means of its rows and columns."""
    torch.manual_seed(0)
    net = nn.Sequential(Layer(Mixture()), Layer(Routed(Stacked())))
    job = Job(net, verify="off")
    job.optimizer = weft.DistributedOptimizer(torch.optim.Adafactor(job.model.parameters(), lr=0.01))
    job.plain = torch.optim.Adafactor(job.alone.parameters(), lr=0.01)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-4)
    assert job.shared() == ["0.mixture", "1.mixture.experts"]
    torch.testing.assert_close(job.model.state_dict(), dict(job.alone.state_dict()), rtol=1e-4, atol=1e-5)


@CHECKS.check
def an_optimizer_that_looks_at_several_weights_is_refused() -> None:
    """A replica has its experts alone."""
    job = Job(verify="off")
    job.optimizer = weft.DistributedOptimizer(ByAllGradients(job.model.parameters()))
    with pytest.raises(
        UsageError, match='looks at several weights .*"(partitions|expert_parallel_degree)": 1'
    ):
        job.train()


class Chained(Mixture):
    """Each expert gets what the one before it has given."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        for number, expert in enumerate(self.experts):
            rows = rows + expert(rows) * self.router(x).softmax(-1)[:, 0, number, None]
        return x + rows[:, None]


@CHECKS.check
def what_cannot_be_shared_stays_whole(caplog: Any = None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Layer(Chained()), Layer(Sorted()), Layer(Routed(Stacked(how="spoilt"))))
    job = Job(net)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert "0.mixture" not in job.shared() and "1.mixture" not in job.shared()
    job.compare()


@CHECKS.check
def others_do_not_call_an_expert() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(Layer(Mixture()), Layer(Mixture())))
    job.train(1)
    own = next(n for n in (0, 1) if job.model.is_local(f"{n}.mixture.experts.0.0.weight"))
    with pytest.raises(
        UsageError, match=r"experts\.0, an expert that one of several replicas has, is called by"
    ):
        job.model.module[own].mixture.experts[0](torch.randn(3, WIDTH))


class Drawn(nn.Module):
    """A mixture of a random kind: modules or one weight, a number of choices, equal scores, a capacity."""

    def __init__(self, numbers: torch.Generator) -> None:
        super().__init__()

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=numbers))

        self.number = draw(2, 6)
        self.choices, self.capacity = draw(1, self.number), draw(1, 12) if draw(0, 1) else None
        self.router = nn.Linear(WIDTH, self.number)
        if draw(0, 3) == 0:
            nn.init.zeros_(self.router.weight)
            nn.init.zeros_(self.router.bias)
        self.stacked = bool(draw(0, 1))
        self.experts: nn.Module = Stacked(self.number) if self.stacked else nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(self.number)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, which = self.router(flat).softmax(-1).topk(self.choices, -1)
        if self.capacity is not None:  # of each expert's rows the first stay, in each sample
            taken = nn.functional.one_hot(which, self.number).view(len(x), -1, self.number).cumsum(1)
            weights = weights * (
                taken.view(*which.shape, -1).gather(-1, which[..., None])[..., 0] <= self.capacity
            )
        if self.stacked:
            return self.experts(flat, which, weights).view(x.shape)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where((which == number) & (weights > 0))
            if len(rows):
                result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, nth, None])
        return result.view(x.shape)


@CHECKS.check
def random_mixtures() -> None:
    shared = 0
    for seed in range(6):
        torch.manual_seed(seed)
        numbers = torch.Generator().manual_seed(seed)
        job = Job(nn.Sequential(*(Layer(Drawn(numbers)) for _ in range(3))))
        assert job.train(2) == pytest.approx(job.train_alone(2), rel=1e-5), seed
        shared += len(job.shared())  # an expert that gets every row makes no mixture
        job.compare()
    assert shared > 12


def _causal(name: str) -> nn.Module:
    """A small model of `transformers` with mixtures."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "head_dim": 8,
        "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
        "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "output_router_logits": True},
        "DeepseekV3": latent,
        "GptOss": {"num_local_experts": 4},
        "Olmoe": {"num_experts": 4},
        "GraniteMoe": {"num_local_experts": 4},
        "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 24, "num_experts_per_tok": 1},
    }
    torch.manual_seed(0)
    if name == "SwitchTransformers":
        config: Any = transformers.SwitchTransformersConfig(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
            expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
            pad_token_id=0, dropout_rate=0.0, router_jitter_noise=0.0,
        )  # fmt: skip
        return transformers.SwitchTransformersForConditionalGeneration(config)
    kind = f"{name}TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, kind)(**{**shape, **more[name]})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if not float(parameter.detach().abs().sum()):
            nn.init.normal_(parameter, std=0.05)
    return model


@CHECKS.of_each(
    "Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "Olmoe", "GraniteMoe", "Llama4", "SwitchTransformers"
)
def models_of_transformers(name: str) -> None:
    weft.init({"partitions": given.partitions, "microbatches": 2})
    alone = _causal(name)
    model = weft.DistributedModel(_causal(name))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4))
    plain = torch.optim.AdamW(alone.parameters(), lr=0.003, eps=1e-4)

    @weft.step
    def step(model: nn.Module, words: Tensor) -> Tensor:
        loss = model(input_ids=words, labels=words).loss
        model.backward(loss)
        return loss

    for number in range(2):
        batch = torch.randint(
            1, 64, (4 * weft.rdp_size(), 6), generator=torch.Generator().manual_seed(number)
        )
        optimizer.zero_grad()
        plain.zero_grad()
        step(model, batch.chunk(weft.rdp_size())[weft.rdp_rank()])
        for rows in batch.chunk(2 * weft.rdp_size()):
            (alone(input_ids=rows, labels=rows).loss / (2 * weft.rdp_size())).backward()
        optimizer.step()
        plain.step()
    assert Splits.from_record(model.plan.experts).linears()
    torch.testing.assert_close(model.state_dict(), dict(alone.state_dict()), rtol=1e-4, atol=2e-5)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
