"""Modules of experts that can be split: parts of their weights are tried out until their results add up.

A module that holds experts has weights with one matrix for each expert, ``[experts, results, inputs]``. Its code may
do anything with them: a loop over those that are needed, one product for all, gates before or behind each other. So
nothing is read from its names. The search makes up weights and inputs, computes the whole, and the results of all
ranks on their parts. If the sums agree, of the results and of all gradients, the module is split in this way. Where
parts meet something that is not linear, or a bias counts twice, they do not agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from weft.torch.pytorch.private import version
from weft.torch.tensor_parallel.cuts import Cut, cut_by
from weft.torch.tensor_parallel.splits import EXPERTS, OF_EXPERTS, ONCE, Linear, PartOf
from weft.torch.tensors.pytree import map_tensors

from .equivalence import BY_OBJECT, PLAIN, Bench, Outcome, equal, in_objects, kind_of, plus
from .mixtures import hooked_in, is_in, outline
from .sharded_experts import Own, run_own
from .sharded_experts import run as run_with

WRITES = "its experts write into buffers"
MADE = "its weights are made from others (parametrizations)"
MOST_TRIED = 128
_WHOLE = -2
Tries = list[tuple[Bench, Outcome]]
"""Made-up weights and inputs, and what the whole module gives with them."""
Agreement = Callable[[Bench, Outcome, Sequence[PartOf], int], bool]
"""True if so many ranks, with these parts of the weights, compute what one does."""
Fitting = Callable[[nn.Module, Any, Any, int, str], tuple[Linear | None, str]]
"""For a module, what it is called with, the number of ranks and the setting ``experts``."""


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with several weights of three dimensions, which may be experts, by name; PyTorch's own are none."""
    return {
        name: module
        for name, module in model.named_modules()
        if len(_stacks(module, False)) > 1 and not type(module).__module__.startswith("torch.")
    }


def around_lonely(model: nn.Module) -> dict[str, nn.Module]:
    """The modules right around several that have one such weight each, by name."""
    around: dict[str, int] = {}
    for name in lonely(model):
        above = name.rpartition(".")[0]
        around[above] = around.get(above, 0) + (name != "")
    return {name: model.get_submodule(name) for name, count in around.items() if count > 1}


def lonely(model: nn.Module) -> dict[str, str]:
    """The modules that have nothing but one weight of several matrices, by name, and why they stay whole."""
    found = {}
    for name, module in model.named_modules():
        values = [*module.parameters()]
        if len(values) == 1 and len(_stacks(module, False)) == 1 and min(values[0].shape) > 1:
            shape = " x ".join(map(str, values[0].shape))
            found[name] = f"its weight, {shape}, is the only one, so there is no sum in it"
    return found


def _stacks(module: nn.Module, inside: bool = True) -> dict[str, Tensor]:
    """The weights with one matrix for each expert; where the module has none itself, those of modules ``inside``."""
    own: dict[str, Tensor] = {n: v for n, v in module.named_parameters(recurse=False) if v.dim() == 3}
    if own or not inside:
        return own
    return {name: value for name, value in module.named_parameters() if value.dim() == 3}


def _others(module: nn.Module) -> list[str]:
    """Its other parameters."""
    stacks = _stacks(module)
    nested = any("." in name for name in stacks)
    return [name for name, _ in module.named_parameters(recurse=nested) if name not in stacks]


def find_experts(
    model: nn.Module,
    run: Callable[[], Any],
    size: int,
    owners: Mapping[int, Sequence[str]],
    why: Callable[[str], str],
    share: str = "auto",
    inside: Collection[str] = (),
    cut: Collection[str] = (),
    leaking: Collection[str] = (),
    fitting: Fitting | None = None,
) -> tuple[dict[str, Linear], dict[str, str], dict[str, str]]:
    """The modules of experts that can be split, and how; the others, and why; and of the former why not otherwise.

    Args:
        model: The model, whole.
        run: Runs it once.
        size: How many ranks axis ``tp`` has.
        owners: For each parameter, by its id, the modules that have it.
        why: Says for a module why the script's own wishes or changes keep it whole; empty if nothing does.
        share: How ranks hold experts, as the setting ``experts``; ``auto``: a shard of every one if their sums agree.
        inside: Modules that are split already, as parts of others.
        cut: Linears that are split in pairs.
        leaking: Modules out of which tensors get by another way than their result.
        fitting: Finds how a module can be split, and why not otherwise; over ranks with the same rows, if not given.
    """
    around = around_lonely(model)
    tried = {name: each for name, each in {**candidates(model), **around}.items() if name not in inside}
    if not tried:
        return {}, {}, {}
    calls, made = _calls(tried, run)
    found: dict[str, Linear] = {}
    whole: dict[str, str] = {}
    notes: dict[str, str] = {}
    known: dict[Any, tuple[Linear | None, str]] = {}
    for name, module in tried.items():
        if name in around and name not in calls:
            continue  # it is no function of what it is called with
        kind = kind_of(name, module)
        reason = why(name) or _why_not(module, owners) or _why_not_around(model, name, cut, leaking)
        reason = reason or in_objects(calls.get(name)) * BY_OBJECT or (name in made) * MADE
        if not reason and kind not in known and name not in calls:
            reason = "the run did not call it"
        if not reason:
            if kind not in known:
                known[kind] = (fitting or _fitting)(module, *calls[name], size, share)
            outcome, reason = known[kind]
            if outcome is not None:
                found[name] = outcome
                if reason:
                    notes[name] = reason
                continue
        whole[name] = reason
    return found, whole, notes


def _why_not(module: nn.Module, owners: Mapping[int, Sequence[str]]) -> str:
    """Why it need not be tried."""
    stacks = _stacks(module)
    nested = any("." in name for name in stacks)
    if len({len(value) for value in stacks.values()}) > 1:
        shapes = " and ".join(f"{name} {list(value.shape)}" for name, value in stacks.items())
        return f"its weights are for other numbers of experts: {shapes}"
    values = [*module.parameters(recurse=nested)]
    if any(type(value) is not nn.Parameter or value.dtype not in PLAIN for value in values):
        return "its weights are no plain floating-point numbers"
    if not nested and any(True for child in module.children() for _ in child.parameters()):
        return "it has modules with weights inside"
    if any(len(owners[id(value)]) > 1 for value in values):
        return "it shares parameters with another module"
    return ""


def _why_not_around(model: nn.Module, name: str, cut: Collection[str], leaking: Collection[str]) -> str:
    """Why a module cannot be split together with those inside of it."""
    if any(is_in(each, name) for each in leaking):
        return "tensors get out of it by another way than its result"
    if _stacks(model.get_submodule(name), False):
        return ""
    if any(is_in(each, name) for each in cut):
        return "linears in it are split by themselves"
    hooked = hooked_in(model, name)
    return f"{hooked} has hooks" if hooked else ""


def _calls(
    tried: Mapping[str, nn.Module], run: Callable[[], Any]
) -> tuple[dict[str, tuple[Any, Any]], set[str]]:
    """The first arguments that each of them is called with, without the content of tensors of numbers; and those whose
    weights are made from others while they run, as adapters of PEFT do it."""
    calls: dict[str, tuple[Any, Any]] = {}
    made: set[str] = set()

    def note(name: str, args: Any, kwargs: Any) -> None:
        if name not in calls:
            calls[name] = map_tensors((args, kwargs), outline)

    handles = []
    for name, module in tried.items():

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            note(name, args, kwargs)
            if is_parametrized(module):
                made.add(name)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls, made


def _fitting(module: nn.Module, args: Any, kwargs: Any, size: int, share: str) -> tuple[Linear | None, str]:
    """The way in which the module can be split, and why not otherwise; or why it cannot at all."""
    tries = tries_of(module, args, kwargs)
    if isinstance(tries, str):
        return None, tries
    parts = partial(_by_part, module, tries, size)
    ranks = partial(by_rank, module, tries, count_experts(module), size)
    reasons: list[str] = []
    ways = {"expert_tensor_parallel": [parts], "expert_parallel": [ranks, parts], "auto": [parts, ranks]}
    for way in ways[share]:
        outcome = way()
        if isinstance(outcome, Linear):
            return outcome, reasons[0] if reasons else ""
        reasons.append(outcome)
    return None, reasons[-1] if share == "expert_parallel" else reasons[0]


def count_experts(module: nn.Module) -> int:
    """The number of experts that the module has weights for."""
    return len(next(iter(_stacks(module).values())))


def tries_of(module: nn.Module, args: Any, kwargs: Any) -> Tries | str:
    """The module with made-up weights and inputs, and with larger ones; or why it cannot be tried."""
    bench, tries = Bench(module, args, kwargs, count_experts(module)), []
    for each in (bench, bench.larger(_stacks(module).__contains__)):
        expected = each.run(each.weights, partial(run_with, module))
        if expected is None:
            return "it fails with weights and inputs that are made up, or writes into its inputs or weights"
        tries.append((each, expected))
    return tries


def _by_part(module: nn.Module, tries: Tries, size: int) -> Linear | str:
    """Each rank has a part of every expert."""
    stacks = _stacks(module)
    smallest = min(max(value.shape[1:]) for value in stacks.values())
    if smallest < size:
        return f"its experts' matrices have {smallest} rows and columns at most, fewer than the {size} ranks"
    width = tries[0][0].width
    for parts in itertools.islice(_ways(module, width, size), MOST_TRIED):
        if all(_sums_agree(*each, parts, size) for each in tries):
            return Linear(EXPERTS, parts=parts)
    inner = {n for value in stacks.values() for n in value.shape[1:] if n != width and n % size}
    uneven = f", and {' and '.join(map(str, sorted(inner)))} cannot be divided by {size}" if inner else ""
    return f"its parts on {size} ranks do not add up to what it computes{uneven}"


def writes_buffers(module: nn.Module, run: Callable[[], Any]) -> bool:
    """True if ``run`` writes into buffers of the module, of which each rank would write what its own experts give."""
    before = [(id(each), version(each)) for each in module.buffers()]
    if before:
        run()
    return before != [(id(each), version(each)) for each in module.buffers()]


def by_rank(
    module: nn.Module, tries: Tries, experts: int, size: int, agree: Agreement | None = None
) -> Linear | str:
    """Each rank has some of the experts. ``agree``: says whether these ranks compute what one does."""
    if experts < size:
        return f"its {experts} experts are fewer than the {size} ranks"
    if writes_buffers(module, lambda: tries[0][0].run(tries[0][0].weights, partial(run_with, module))):
        return WRITES
    options = []
    for name in [*_stacks(module), *_others(module)]:
        value = module.get_parameter(name)
        with_all = value.dim() > 0 and len(value) == experts
        options.append(
            [PartOf(name, OF_EXPERTS, (experts,))] if value.dim() == 3
            else [PartOf(name, OF_EXPERTS, (experts,))] * with_all + [PartOf(name, _WHOLE, ())]
        )  # fmt: skip
    for _, chosen in sorted(_products(options), key=lambda each: each[0])[:MOST_TRIED]:
        parts = tuple(part for part in chosen if part.dim != _WHOLE)
        if all((agree or _sums_agree)(*each, parts, size) for each in tries):
            return Linear(EXPERTS, parts=parts)
    return f"its experts on {size} ranks do not add up to what it computes"


def _ways(module: nn.Module, width: int, size: int) -> Iterator[tuple[PartOf, ...]]:
    """Ways of cutting the parameters, the likely ones first: the inner size of an expert is that of no input."""
    stacks = _stacks(module)
    others = _others(module)
    inner = {name: [n for n in value.shape[1:] if n != width] or [width] for name, value in stacks.items()}
    sizes = [max(each) for each in inner.values()]
    options: list[list[PartOf]] = []
    for name, value in stacks.items():
        ways = []
        for dim in sorted((1, 2), key=lambda dim: value.shape[dim] == width):
            total = value.shape[dim]
            blocks = [(total,)] * (total >= size) + [(total // 2,) * 2] * (
                total % 2 == 0 and total // 2 >= size
            )
            if total > min(sizes):  # gates and values behind each other
                blocks.reverse()
            ways += [PartOf(name, dim, each) for each in blocks]
        options.append(ways)
    found = []
    for doubt, chosen in _products(options):
        known = {(len(stacks[part.name]), sum(part.blocks)): part.blocks for part in chosen}
        for more, rest in _products([_of_other(module, name, known) for name in others]):
            found.append((doubt + more, (*chosen, *rest)))
    for _, parts in sorted(found, key=lambda each: each[0]):
        yield tuple(part for part in parts if part.dim != _WHOLE)


def _products(options: list[list[PartOf]]) -> Iterator[tuple[int, tuple[PartOf, ...]]]:
    """One of each, and how unlikely it is."""
    for numbers in itertools.product(*(range(len(ways)) for ways in options)):
        yield sum(numbers), tuple(ways[n] for ways, n in zip(options, numbers, strict=True))


def _of_other(module: nn.Module, name: str, known: Mapping[tuple[int, int], tuple[int, ...]]) -> list[PartOf]:
    """The ways to hold a bias and the like: cut as a weight is, counted on one rank only, or used on all."""
    shape = module.get_parameter(name).shape
    blocks = known.get((shape[0], shape[-1])) if len(shape) == 2 else None
    ways = [] if blocks is None else [PartOf(name, 1, blocks)]
    return [*ways, PartOf(name, ONCE, ()), PartOf(name, _WHOLE, ())]


def _sums_agree(bench: Bench, expected: Outcome, parts: Sequence[PartOf], size: int) -> bool:
    """True if the ranks' results and gradients add up to what is expected."""
    places = {part.name: part for part in parts}
    cuts = {
        part.name: Cut(part.dim, part.blocks, tuple(bench.weights[part.name].shape))
        for part in parts
        if part.dim != ONCE
    }
    results: list[Tensor] = []
    gradients: list[Tensor] = []
    shared: dict[str, Tensor] = {}
    for rank in range(size):
        weights = {
            name: cut_by(value, cuts[name], rank, size) if name in cuts
            else value * 0 if name in places and rank > 0 else value
            for name, value in bench.weights.items()
        }  # fmt: skip
        call = partial(run_with, bench.module)
        if Linear(EXPERTS, parts=tuple(parts)).by_rank():
            total = len(next(iter(_stacks(bench.module).values())))
            call = partial(run_own, bench.module, Own.of(total, rank, size))
        outcome = bench.run(weights, call)
        if outcome is None or [each.shape for each in outcome.results] != [e.shape for e in expected.results]:
            return False
        if not equal(outcome.others, expected.others):
            return False
        results = plus(results, outcome.results)
        gradients = plus(gradients, outcome.gradients)
        for name, gradient in outcome.weights.items():
            if name in cuts:
                if not bench.near(gradient, cut_by(expected.weights[name], cuts[name], rank, size)):
                    return False
            elif name not in places or rank == 0:
                shared[name] = shared[name] + gradient if name in shared else gradient
    sums = [*zip(results, expected.results, strict=True), *zip(gradients, expected.gradients, strict=True)]
    sums += [(value, expected.weights[name]) for name, value in shared.items()]
    return all(bench.near(actual, wanted) for actual, wanted in sums)
