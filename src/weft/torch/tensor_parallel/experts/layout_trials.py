"""Layouts of a mixture's experts over ranks: tried out with weights and inputs that are made up.

The mixture is run as each of the ranks would run it. Its results have to add up, or be the same on all ranks, and so do
all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.pytorch.private import imagined_mesh
from weft.torch.tensor_parallel.shard_group import ShardGroup, new_name
from weft.torch.tensor_parallel.splits import MIXTURE, Held, Linear
from weft.torch.tensors.pytree import tensors_in

from .equivalence import Bench, Call, Outcome, equal, in_mode, plus
from .expert_parallel import ABOVE, ALIKE, NO_TENSOR, SUM, Mixture, members
from .sharded_experts import having

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
FAILS = "it fails with weights and inputs that are made up, or writes into its inputs"


def tried(
    module: nn.Module, experts: Sequence[Held], choices: int, args: Any, kwargs: Any, size: int
) -> Linear | str:
    """The layout of a mixture's experts over ranks; or why there is none.

    Args:
        module: The mixture.
        experts: Which rank is to have which.
        choices: How many experts there are to be chosen from.
        args: What the mixture is called with.
        kwargs: The same by name.
        size: How many ranks there are.
    """
    held = tuple(replace(each, draws=False) for each in experts)  # here they draw nothing
    lists = {each.name.partition(".")[0] for each in held}
    others = [
        own
        for own, child in module.named_children()
        if own not in lists and next(child.parameters(), None) is not None
    ]
    bench = Bench(module, args, kwargs, choices)
    names = tuple(f"{each.name}." for each in held)
    larger = bench.larger(lambda name: name.startswith(names))

    def alone(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        with having(module, weights):
            return type(module).forward(module, *args, **kwargs)

    inside = [each for one in held for each in module.get_submodule(one.name).modules()]
    with in_mode(False, [each for each in inside if isinstance(each, DROPOUTS)]):  # ranks draw other numbers
        expected, expected_larger = bench.run(bench.weights, alone), larger.run(larger.weights, alone)
        if expected is None or expected_larger is None:
            return FAILS
        unused = [each for each in expected.unused if not each.startswith(names)]
        if unused:
            return f"its {sorted(unused)[0]} gets no gradient"
        beside = ((), *((Held(each, None),) for each in others))
        for flag, extra in [*((SUM, one) for one in beside), *((ABOVE, one) for one in reversed(beside))]:
            blocks = tuple(flag if made else NO_TENSOR for made in expected.made)
            linear = Linear(MIXTURE, blocks, held=(*held, *extra))
            flags = _exact(bench, linear, expected, size)
            if flags is not None:
                linear = replace(linear, blocks=flags)
                if _exact(larger, linear, expected_larger, size) == flags:
                    return replace(linear, held=(*under_autocast(bench, experts, alone), *extra))
    return "the results of its experts are not just summed"


def under_autocast(bench: Bench, experts: Sequence[Held], alone: Call) -> Iterator[Held]:
    """The experts, and whether their results have the type of autocast: a later step may use it for the first time."""
    rounded: dict[str, bool] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            rounded[name] = tensors_in(result)[0].dtype != tensors_in((args, kwargs))[0].dtype

        return hook

    with ExitStack() as stack:
        for each in experts:
            member = bench.module.get_submodule(each.name)
            stack.callback(member.register_forward_hook(note(each.name), with_kwargs=True).remove)
        with torch.autocast(bench.device.type, torch.bfloat16):
            bench.run(bench.weights, alone)
    lists = {name.rpartition(".")[0]: found for name, found in rounded.items()}
    for each in experts:
        yield replace(each, rounded=lists.get(each.name.rpartition(".")[0], each.rounded) or each.rounded)


def _of_ranks(bench: Bench, linear: Linear, size: int, rest: bool = False) -> list[Outcome] | None:
    """The outcome of each rank by itself; None if one of them fails. ``rest``: what is there without experts."""
    module, outcomes = bench.module, []
    with imagined_mesh(size, bench.device.type, new_name()) as mesh:
        for rank in range(size):
            shard_group = ShardGroup(mesh, None, rank, size)
            mixture = Mixture(module, linear, shard_group)
            standing = members(mixture)

            def call(
                weights: Mapping[str, Tensor], args: Any, kwargs: Any, mixture: Mixture = mixture
            ) -> Any:
                with having(module, weights):
                    return mixture.with_and_without(*args, **kwargs)[1] if rest else mixture(*args, **kwargs)

            for inner, stands in standing.items():
                inner.__dict__["forward"] = stands
            try:
                outcome = bench.run(bench.weights, call)
            finally:
                for inner in standing:
                    inner.__dict__.pop("forward", None)
            if outcome is None:
                return None
            outcomes.append(outcome)
    return outcomes


def _exact(bench: Bench, linear: Linear, expected: Outcome, size: int) -> tuple[int, ...] | None:
    """For each result what ranks do with it; None if results or gradients of the ranks are not the whole ones."""
    outcomes, rest = _of_ranks(bench, linear, size), None
    if ABOVE in linear.blocks and outcomes is not None:
        without = _of_ranks(bench, linear, 1, rest=True)
        if without is None:
            return None
        rest = without[0].results
    flags = None if outcomes is None else _flags(bench, expected, outcomes, rest)
    if flags is None:
        return None
    found = iter(flags)
    blocks = tuple(next(found) if made else NO_TENSOR for made in expected.made)
    if ALIKE in flags:
        linear = replace(linear, blocks=blocks)
        outcomes = _of_ranks(bench, linear, size)
    return blocks if outcomes is not None and _sums_agree(bench, linear, expected, outcomes) else None


def _flags(
    bench: Bench, expected: Outcome, outcomes: Sequence[Outcome], rest: Sequence[Tensor] | None
) -> tuple[int, ...] | None:
    """For each result what ranks do with it; None if what they have is not the whole.

    ``rest``: what is there without experts; None if nothing is taken to be.
    """
    flags = []
    for number, whole in enumerate(expected.results):
        parts = [outcome.results[number] for outcome in outcomes if len(outcome.results) > number]
        if len(parts) < len(outcomes) or any(part.shape != whole.shape for part in parts):
            return None
        if rest is not None and rest[number].shape != whole.shape:
            return None
        base = torch.zeros_like(whole) if rest is None else rest[number]
        if all(bench.near(part, whole) for part in parts):
            flags.append(ALIKE)
        elif bench.near(torch.stack([part - base for part in parts]).sum(0), whole - base):
            flags.append(SUM if rest is None else ABOVE)
        else:
            return None
    same = all(equal(each.others, expected.others) for each in outcomes)
    return tuple(flags) if same and any(flags) else None


def _sums_agree(bench: Bench, linear: Linear, expected: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """True if gradients of all inputs and weights add up over the ranks; those of modules beside are whole on each."""
    beside = tuple(f"{each.name}." for each in linear.held if each.rank is None)
    inputs: list[Tensor] = []
    for outcome in outcomes:
        inputs = plus(inputs, outcome.gradients)
    sums = [*zip(inputs, expected.gradients, strict=True)]
    for name, whole in expected.weights.items():
        found = [each.weights[name] for each in outcomes]
        sums += [
            (each, whole) for each in (found if name.startswith(beside) else [torch.stack(found).sum(0)])
        ]
    return all(bench.near(actual, whole) for actual, whole in sums)
