"""What can be split, found by running the model in parts: as the first of ranks that are not there.

Each linear that gets a whole tensor is tried as one cut by its results; one that gets a tensor in parts, as one cut by
its inputs. In between, every function on a tensor in parts is watched. What fails, needs messages between the ranks or
loses the parts is a conflict: the linears where its tensors come from stay whole, with the reason, and so do those like
them in other layers. The model is run again without them, until nothing changes. Numbers are garbage meanwhile; shapes
are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.torch.pytorch.private import (
    has_backward_hooks,
    has_forward_hooks,
    imagined_mesh,
    is_compiled,
)
from weft.torch.pytorch.private_dtensor import take_plain_for_whole
from weft.torch.session.random_streams import Streams
from weft.torch.tensors.marks import WHOLE

from .attention import why_whole
from .experts import around_lonely, find_experts, find_mixtures, lonely, shares_out
from .experts import candidates as experts_of
from .experts.idle_experts import adopt_uncalled
from .functions import answer, forget
from .requested import features, is_linear, refuse_whole, wished
from .search_trial import Stop, Trial, Watcher
from .shard_group import ShardGroup, new_name
from .sharded_activations import SCORES, TOKENS, watch
from .splits import COLUMN, HEADS, HOW, MIXTURE, ROW, VOCABULARY, Linear, Region, Splits
from .vocabulary import find_vocabulary

_WANTED = "the script wants it whole"
_BESIDE = "each rank makes something of its own of it, for its share of the experts around"


def find(
    model: nn.Module, run: Callable[[], Any], size: int, sequence: bool = False, experts: str = "auto",
    leaking: Collection[str] = (),
) -> Splits:  # fmt: skip
    """Which linears of ``model`` can be split over ``size`` ranks, and how.

    One process does this by itself; no other one takes part. The model is as before afterwards: parameters, buffers and
    random numbers.

    Args:
        model: The model, whole, on the CPU, a GPU or ``meta``.
        run: Runs the model once on one microbatch, with or without the loss. It is run several times.
        size: How many ranks axis ``tp`` has.
        sequence: Whether tokens are to be in parts between the linears that are split.
        experts: How ranks share experts: as the settings say it.
        leaking: Modules out of which tensors get by another way than their result.

    Raises:
        UsageError: This PyTorch cannot imagine ranks.
        UsageError: What the script wants to be split cannot be, see :func:`wished`.
        Exception: Whatever ``run`` raises for the whole model.
    """
    whole, wanted = _excluded(model), wished(model)
    words_wanted = [name for name, how in wanted.items() if how == VOCABULARY]
    if size > 1:
        refuse_whole(model, {name: why for name, why in whole.items() if name not in words_wanted})
        refuse_whole(model, _misfits(model, wanted, size))
    candidates = {
        n: m for n, m in model.named_modules() if is_linear(m) and n not in whole and n not in words_wanted
    }
    attentions = {n: m for n, m in model.named_modules() if type(m) is nn.MultiheadAttention}
    embedded = any(isinstance(module, nn.Embedding) for module in model.modules())
    mixed = experts_of(model) or around_lonely(model)
    if size == 1 or not (candidates or attentions or embedded or wanted or mixed):
        return Splits(size, (), whole)
    take_plain_for_whole()
    device = next(model.parameters()).device
    kind = "cpu" if device.type == "meta" else device.type
    with imagined_mesh(size, kind, new_name()) as mesh, keep_state(model, device):
        shard_group = ShardGroup(mesh, None, 0, size)
        owners, wish = _owners(model), partial(_own_wish, model, hooks=False)
        mixtures, uneven = ({}, {}) if experts == "parts" else find_mixtures(
            model, run, size, owners,
            lambda name: "the script says how to split it" if name in wanted else wish(name), leaking,
        )  # fmt: skip
        inside = {name for name, _ in model.named_modules() if shares_out(mixtures, name)}
        whole = {name: reason for name, reason in whole.items() if name not in inside}
        trial = Trial(
            {name: each for name, each in candidates.items() if name not in inside}, size,
            {name: how for name, how in wanted.items() if name not in words_wanted},
        )  # fmt: skip
        while _once(run, shard_group, trial):
            pass  # each run keeps more linears whole, or takes one more for a fused projection
        adopt_uncalled(model, trial)
        whole.update(trial.whole)
        words, others = find_vocabulary(
            model, run, size, owners, whole,
            lambda name: _BESIDE if name in inside else wish(name), words_wanted,
        )  # fmt: skip
        refuse_whole(model, others)
        stacked, uncut, told = find_experts(
            model, run, size, owners, wish, experts, inside, {*trial.kinds, *trial.alone, *words}, leaking
        )  # fmt: skip
        kinds = {name: SCORES for name in words if not isinstance(model.get_submodule(name), nn.Embedding)}
        if sequence:
            kinds.update({name: TOKENS for name in words if name not in kinds})
            kinds.update({name: TOKENS for name, kind in trial.kinds.items() if kind == ROW})
        columns = [name for name, kind in trial.kinds.items() if kind == COLUMN]
        columns += [name for name in trial.alone if wanted[name] == COLUMN]
        gathering = [*columns, *(name for name, kind in kinds.items() if kind == SCORES)]
        spread, notes = watch(model, run, size, kinds, gathering)
    regions = _regions(model, trial)
    regions.update({name: {name: Linear(wanted[name])} for name in trial.alone})
    regions.update({name: {name: linear} for name, linear in {**stacked, **mixtures}.items()})
    whole.update(_uncut_experts(model, inside, stacked, uncut))
    for name, attention in attentions.items():
        if name not in inside:
            whole.pop(f"{name}.out_proj", None)
            shared = any(len(owners[id(parameter)]) > 1 for parameter in attention.parameters())
            if reason := _why_attention_is_whole(model, name, attention, size, shared, trial.called):
                whole[name] = reason
            else:
                regions[name] = {name: Linear(HEADS)}
    whole.update(others)
    for name in words:
        whole.pop(name, None)
        regions[name] = {name: Linear(VOCABULARY)}
    found = tuple(Region(name, regions[name]) for name, _ in model.named_modules() if name in regions)
    whole = {name: whole[name] for name, module in model.named_modules() if name in whole}
    for name in wanted:
        besides = "put together" if wanted[name] == COLUMN and name in trial.alone else notes.get(name, "")
        notes[name] = "as the script says" + f", {besides}" * bool(besides)
    notes.update(_notes_of_experts(stacked, told))
    by_part = {name: f"not {HOW[MIXTURE]}: {why}" for name, why in uneven.items()}
    return Splits(size, found, whole, tuple(spread), notes, by_part)


def _why_attention_is_whole(
    model: nn.Module,
    name: str,
    attention: nn.MultiheadAttention,
    size: int,
    shared: bool,
    called: Collection[int],
) -> str:
    """Why the ``attention`` of that name stays whole; empty if its heads can be split."""
    if shared:
        return "it shares parameters with another module"
    if id(attention) not in called:
        return "the run did not call it"
    return why_whole(attention, size) or _own_wish(model, name)


def _notes_of_experts(stacked: Mapping[str, Linear], told: Mapping[str, str]) -> dict[str, str]:
    """Why experts are split in another way than the first one that is tried."""
    return {
        name: f"{'not inside of each expert' if stacked[name].by_rank() else f'not {HOW[MIXTURE]}'}: {why}"
        for name, why in told.items()
    }


def _uncut_experts(
    model: nn.Module, inside: Collection[str], cut: Collection[str], uncut: Mapping[str, str]
) -> dict[str, str]:
    """Weights of experts that stay whole, by module, and why: of several in one module each has a line of its own."""
    alone = {
        name: (around, why)
        for name, why in lonely(model).items()
        if name not in inside and (around := name.rpartition(".")[0]) not in cut
    }
    found = {name: uncut.get(around, why) for name, (around, why) in alone.items()}
    above = {around for around, _ in alone.values()}
    return found | {name: why for name, why in uncut.items() if name not in above}


def _once(run: Callable[[], Any], shard_group: ShardGroup, trial: Trial) -> bool:
    """Run the model once, as far as it comes without a conflict; whether that changed what is tried."""
    trial.begin()
    watcher = Watcher(shard_group, trial)
    answer(watcher)
    try:
        with trial.attached(watcher), _noted(trial.called), watcher.collectives, torch.enable_grad():
            watcher.finish(run())
    except Stop:
        pass
    except Exception as error:
        with torch.no_grad():
            run()  # raises what the model raises by itself
        if not trial.blame(error):
            raise
    finally:
        forget(watcher)
    return trial.changed


def _excluded(model: nn.Module) -> dict[str, str]:
    """Linears that are not even tried, and why."""
    owners = _owners(model)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_linear(module):
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            sharing = [other for other in owners.get(id(weight), ()) if other != name]
            if not is_linear(module):
                found[name] = f"{type(module).__name__} may do more than a linear"
            elif weight is None:
                found[name] = "its weight is made from others (parametrizations)"
            elif sharing:
                found[name] = f"its weight is that of {sharing[0] or 'the model'}, too"
            elif _is_altered(module):
                found[name] = "it has hooks, or its forward was replaced"
            if _is_wanted_whole(model, name):
                found[name] = _WANTED
    return found


def _is_wanted_whole(model: nn.Module, name: str) -> bool:
    """What the script has said of the module, or of the innermost around it of which it has said something."""
    parts, wish = name.split(".") if name else [], False
    for count in range(len(parts) + 1):
        wish = model.get_submodule(".".join(parts[:count])).__dict__.get(WHOLE, (wish,))[0]
    return wish is True


def _misfits(model: nn.Module, wanted: Mapping[str, str], size: int) -> dict[str, str]:
    """The linears that are to be cut into parts of sizes that they have not."""
    found = {}
    for name, how in wanted.items():
        if how != VOCABULARY:
            inputs, results = features(model.get_submodule(name))
            count, what = (results, "results") if how == COLUMN else (inputs, "inputs")
            if count % size:
                found[name] = f"its {count} {what} cannot be divided by {size}"
    return found


def _own_wish(model: nn.Module, name: str, hooks: bool = True) -> str:
    """Why the script's own wishes, or what it did with the module, keep it whole; empty if nothing does.

    ``hooks``: whether its hooks do.
    """
    if _is_wanted_whole(model, name):
        return _WANTED
    return (
        "it has hooks, or its forward was replaced" if _is_altered(model.get_submodule(name), hooks) else ""
    )


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter, by its id, the modules that have it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _is_altered(module: nn.Module, hooks: bool = True) -> bool:
    """True if somebody does something of his own around the module's calls; ``hooks``: whether hooks count."""
    hooked = hooks and (has_forward_hooks(module) or has_backward_hooks(module))
    return hooked or "forward" in vars(module) or is_compiled(module)


@contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers and random numbers are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    streams = Streams(device if device.type == "cuda" else torch.device("cpu"), numpy=True)
    states = streams.capture()
    try:
        yield
    finally:
        streams.restore(states)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _noted(called: set[int]) -> Iterator[None]:
    """Inside, modules that are called are noted by their ids."""

    def note(module: nn.Module, args: Any) -> None:
        called.add(id(module))

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _regions(model: nn.Module, trial: Trial) -> dict[str, dict[str, Linear]]:
    """The smallest modules that hold all linears between which tensors are in parts."""
    group = {name: {name} for name in trial.kinds}
    for fed, sources in trial.fed.items():
        together = set().union(*(group[name] for name in {fed, *sources}))
        for name in together:
            group[name] = together
    roots: dict[str, dict[str, Linear]] = {}
    for name, kind in trial.kinds.items():
        blocks = trial.blocks_of(name) if kind == COLUMN else ()
        root = _root(model, group[name], trial.called) if len(group[name]) > 1 else name
        roots.setdefault(root, {})[name] = Linear(kind, blocks)
    return roots


def _root(model: nn.Module, names: set[str], called: set[int]) -> str:
    """The smallest module that is called and holds all of these."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    while common and id(model.get_submodule(".".join(common))) not in called:
        common.pop()
    return ".".join(common)
