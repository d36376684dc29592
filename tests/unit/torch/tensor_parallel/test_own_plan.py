"""A model's own plan, beside what was found."""

from __future__ import annotations

from torch import nn

from weft.torch.tensor_parallel import Linear, Region, Splits
from weft.torch.tensor_parallel.own_plan import beside_own_plan
from weft.torch.tensor_parallel.splits import PartOf


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(nn.Linear(4, 4).weight.detach()[None]) for _ in range(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.experts = Experts()


class Model(nn.Module):
    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self._tp_plan = {key.replace("__", "."): style for key, style in plan.items()}


EXPERTS = Linear("experts", parts=(PartOf("up", 1, (4,)), PartOf("down", 2, (4,))))


def splits(prefix: str = "") -> Splits:
    layers = [f"{prefix}layers.{n}" for n in range(2)]
    regions = tuple(
        Region(name, {f"{name}.q": Linear("column"), f"{name}.o": Linear("row"), f"{name}.experts": EXPERTS})
        for name in layers
    )
    return Splits(2, regions)


ALL = {
    "layers.*.q": "colwise", "layers.*.o": "rowwise", "layers.*.norm": "sequence_parallel",
    "layers.*.experts.up": "packed_colwise", "layers.*.experts.down": "rowwise", "layers.*.experts": "moe_tp_experts",
}  # fmt: skip


def test_models_without_a_plan() -> None:
    assert beside_own_plan(nn.Linear(2, 2), splits()) == ""
    assert beside_own_plan(Model(), splits()) == ""


def test_a_plan_that_agrees() -> None:
    told = "the model's own plan (tp_plan) says the same of 8 weights"
    assert beside_own_plan(Model(**ALL), splits()) == told
    assert beside_own_plan(nn.ModuleDict({"net": Model(**ALL)}), splits("net.")) == told, (
        "also inside of another"
    )


def test_a_plan_that_does_not() -> None:
    other = {**ALL, "layers.*.q": "rowwise", "layers.0.norm": "colwise"}
    del other["layers.*.o"], other["layers.*.norm"]
    assert beside_own_plan(Model(**other), splits()).splitlines() == [
        "the model's own plan (tp_plan) says the same of 4 weights, and something else of these. "
        "What a sharded run has shown counts:",
        "  layers.*.q       2  its plan: rowwise  here: column-parallel",
        "  layers.*.o       2  its plan: nothing  here: row-parallel",
        "  layers.*.norm    1  its plan: colwise  here: whole: it is no linear, embedding or mixture of experts",
    ]


def test_why_it_stays_whole() -> None:
    told = beside_own_plan(Model(**ALL), Splits(2, (), {"layers.0.q": "softmax takes the whole"}))
    assert (
        "  layers.*.q               1  its plan: colwise         here: whole: softmax takes the whole" in told
    )
