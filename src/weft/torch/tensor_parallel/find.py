"""Modules that can be split, found by running the sharded model: as the first of ranks that are not there.

Each linear that gets a full tensor is tried as column-parallel; one that gets a shard, as row-parallel. In between,
every function on a sharded tensor is watched. What fails, needs messages between the ranks or loses the shards is a
conflict: the linears where its tensors come from stay whole, with the reason, and so do those like them in other
layers. The model is run again without them, until nothing changes. Numbers are garbage meanwhile; shapes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.torch.backward.autograd import has_gradient_hooks, is_hooked
from weft.torch.pytorch.private import (
    imagined_mesh,
    is_compiled,
)
from weft.torch.pytorch.private_dtensor import take_plain_as_replicated
from weft.torch.tensors.marks import WHOLE

from .attention import why_whole
from .experts import around_lonely, find_experts, find_mixtures, lonely, shares_out
from .experts import candidates as experts_of
from .experts.idle_experts import adopt_uncalled
from .experts.mixtures import is_in
from .functions import answering
from .search_trial import Stop, Trial, Watcher
from .shard_group import ShardGroup, new_name
from .sharded_activations import SCORES, TOKENS, watch
from .splits import (
    COLUMN,
    HEADS,
    HOW,
    MIXTURE,
    ROW,
    VOCABULARY,
    Linear,
    Region,
    Splits,
    features,
    is_linear,
    refuse_whole,
    wished,
)
from .vocabulary import find_vocabulary

SHARED = "replicas share its experts"
_WANTED = "the script wants it whole"
_BESIDE = "each rank makes something of its own of it, for its share of the experts around"


def find(
    model: nn.Module, run: Callable[[], Any], size: int, sequence: bool = False, experts: str = "auto",
    leaking: Collection[str] = (), shared: Collection[str] = (),
) -> Splits:  # fmt: skip
    """The linears of ``model`` that can be split over ``size`` ranks, and how.

    One process does this by itself; no other one takes part.

    Args:
        model: The model, whole, on the CPU, a GPU or ``meta``.
        run: Runs the model once on one microbatch, with or without the loss, and leaves nothing behind. It is run
            several times.
        size: How many ranks axis ``tp`` has.
        sequence: Whether tokens are to be sharded between the linears that are split.
        experts: How ranks share experts: as the settings say it.
        leaking: Modules out of which tensors get by another way than their result.
        shared: Modules whose experts replicas share: they stay whole on the ranks of axis ``tp``.

    Raises:
        UsageError: This PyTorch cannot imagine ranks.
        UsageError: What the script wants to be split cannot be, see :func:`wished`.
        Exception: Whatever ``run`` raises for the whole model.
    """
    search = _Search(model, run, size, leaking, shared)
    if size > 1:
        search.refuse_misfits()
    if size == 1 or not search.has_candidates():
        return Splits(size, (), search.whole)
    take_plain_as_replicated()
    device = next(model.parameters()).device
    kind = "cpu" if device.type == "meta" else device.type
    with imagined_mesh(size, kind, new_name()) as mesh:
        search.find_mixtures(experts)
        search.find_linears(ShardGroup(mesh, None, 0, size))
        search.find_vocabulary()
        search.find_experts(experts)
        search.find_sharded_results(sequence)
    return search.splits()


class _Search:
    """The phases of :func:`find` in their order, and what each has found.

    Attributes:
        whole: Modules that stay whole, and why.
        wanted: How the script wants modules to be cut, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], Any],
        size: int,
        leaking: Collection[str],
        shared: Collection[str],
    ) -> None:
        self.model, self.run, self.size, self.leaking = model, run, size, leaking
        self.shared = {n for n, _ in model.named_modules() if any(is_in(n, each) for each in shared)}
        self.whole, self.wanted = _excluded(model), wished(model)
        self.whole |= {n: SHARED for n in self.shared if is_linear(model.get_submodule(n))}
        self.wish = partial(
            _wish_beside, model, self.shared
        )  # no circle: it would keep graphs until Python collects it
        self.words_wanted = [name for name, how in self.wanted.items() if how == VOCABULARY]
        self.candidates = {
            n: m
            for n, m in model.named_modules()
            if is_linear(m) and n not in self.whole and n not in self.words_wanted
        }
        self.attentions = {
            n: m
            for n, m in model.named_modules()
            if type(m) is nn.MultiheadAttention and n not in self.shared
        }

    def refuse_misfits(self) -> None:
        """Refuse wishes of the script that the model or the number of ranks does not allow."""
        words = self.words_wanted
        refuse_whole(self.model, {name: why for name, why in self.whole.items() if name not in words})
        refuse_whole(self.model, _misfits(self.model, self.wanted, self.size))

    def has_candidates(self) -> bool:
        """True if there is anything that could be split."""
        if self.candidates or self.attentions or self.wanted:
            return True
        embedded = any(isinstance(module, nn.Embedding) for module in self.model.modules())
        return bool(embedded or experts_of(self.model) or around_lonely(self.model))

    def find_mixtures(self, experts: str) -> None:
        """Find mixtures whose experts are modules; nothing inside of these is split in another way."""
        self.owners = owners_of(self.model)
        self.mixtures, self.uneven = ({}, {}) if experts == "expert_tensor_parallel" else find_mixtures(
            self.model, self.run, self.size, self.owners,
            lambda name: "the script says how to split it" if name in self.wanted else self.wish(name), self.leaking,
        )  # fmt: skip
        self.inside = {name for name, _ in self.model.named_modules() if shares_out(self.mixtures, name)}
        self.whole = {name: reason for name, reason in self.whole.items() if name not in self.inside}

    def find_linears(self, shard_group: ShardGroup) -> None:
        """Run the model on shards until nothing fails: each run keeps more linears whole."""
        self.trial = Trial(
            {name: each for name, each in self.candidates.items() if name not in self.inside}, self.size,
            {name: how for name, how in self.wanted.items() if name not in self.words_wanted},
        )  # fmt: skip
        while _once(self.run, shard_group, self.trial):
            pass  # each run keeps more linears whole, or takes one more for a fused projection
        adopt_uncalled(self.model, self.trial)
        self.whole.update(self.trial.whole)

    def find_vocabulary(self) -> None:
        """Find embeddings and heads that can be cut by words."""
        self.words, self.others = find_vocabulary(
            self.model, self.run, self.size, self.owners, self.whole,
            lambda name: _BESIDE if name in self.inside else self.wish(name), self.words_wanted,
        )  # fmt: skip
        refuse_whole(self.model, self.others)

    def find_experts(self, experts: str) -> None:
        """Find experts whose weights are one tensor."""
        split = {*self.trial.kinds, *self.trial.alone, *self.words}
        self.stacked, self.uncut, self.expert_notes = find_experts(
            self.model, self.run, self.size, self.owners, self.wish, experts, self.inside, split, self.leaking
        )

    def find_sharded_results(self, sequence: bool) -> None:
        """Find linears and embeddings whose results may stay sharded."""
        trial = self.trial
        kinds = {n: SCORES for n in self.words if not isinstance(self.model.get_submodule(n), nn.Embedding)}
        if sequence:
            kinds.update({name: TOKENS for name in self.words if name not in kinds})
            kinds.update({name: TOKENS for name, kind in trial.kinds.items() if kind == ROW})
        columns = [name for name, kind in trial.kinds.items() if kind == COLUMN]
        columns += [name for name in trial.alone if self.wanted[name] == COLUMN]
        gathering = [*columns, *(name for name, kind in kinds.items() if kind == SCORES)]
        self.sharded, self.notes = watch(self.model, self.run, self.size, kinds, gathering)

    def splits(self) -> Splits:
        """The findings as a value."""
        regions = _regions(self.model, self.trial)
        regions.update({name: {name: Linear(self.wanted[name])} for name in self.trial.alone})
        regions.update({name: {name: linear} for name, linear in {**self.stacked, **self.mixtures}.items()})
        self.whole.update(_uncut_experts(self.model, self.inside, self.stacked, self.uncut))
        self._add_attentions(regions)
        self.whole.update(self.others)
        for name in self.words:
            self.whole.pop(name, None)
            regions[name] = {name: Linear(VOCABULARY)}
        names = [name for name, _ in self.model.named_modules()]
        found = tuple(Region(name, regions[name]) for name in names if name in regions)
        whole = {name: self.whole[name] for name in names if name in self.whole}
        by_part = {name: f"not {HOW[MIXTURE]}: {why}" for name, why in self.uneven.items()}
        return Splits(self.size, found, whole, tuple(self.sharded), self._all_notes(), by_part)

    def _add_attentions(self, regions: dict[str, dict[str, Linear]]) -> None:
        """Give attention modules outside of mixtures to the regions, or the reason why they stay whole."""
        for name, attention in self.attentions.items():
            if name in self.inside:
                continue
            self.whole.pop(f"{name}.out_proj", None)
            shared = any(len(self.owners[id(parameter)]) > 1 for parameter in attention.parameters())
            called = self.trial.called
            if reason := _why_attention_is_whole(self.model, name, attention, self.size, shared, called):
                self.whole[name] = reason
            else:
                regions[name] = {name: Linear(HEADS)}

    def _all_notes(self) -> dict[str, str]:
        """Notes about results, wishes of the script, and experts."""
        notes = dict(self.notes)
        for name, how in self.wanted.items():
            alone = how == COLUMN and name in self.trial.alone
            besides = "all-gathered" if alone else notes.get(name, "")
            notes[name] = "as the script says" + f", {besides}" * bool(besides)
        notes.update(_notes_of_experts(self.stacked, self.expert_notes))
        return notes


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
    return why_whole(attention, size) or own_wish(model, name)


def _notes_of_experts(stacked: Mapping[str, Linear], reasons: Mapping[str, str]) -> dict[str, str]:
    """Why experts are split in another way than the first one that is tried."""
    return {
        name: f"{'not expert tensor parallel' if stacked[name].by_rank() else f'not {HOW[MIXTURE]}'}: {why}"
        for name, why in reasons.items()
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
    attached = trial.attached(watcher)
    try:
        with answering(watcher), attached, _noted(trial.called), watcher.collectives, torch.enable_grad():
            watcher.finish(run())
    except Stop:
        pass
    except Exception as error:
        with torch.no_grad():
            run()  # raises what the model raises by itself
        if not trial.blame(error):
            raise
    return trial.changed


def _excluded(model: nn.Module) -> dict[str, str]:
    """Linears that are not even tried, and why."""
    owners = owners_of(model)
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
    """True if the script wants the module whole, or the innermost around it of which it has said something."""
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


def _wish_beside(model: nn.Module, shared: Collection[str], name: str) -> str:
    """As :func:`own_wish`, where replicas share the experts of some modules."""
    return SHARED if name in shared else own_wish(model, name, hooks=False)


def own_wish(model: nn.Module, name: str, hooks: bool = True) -> str:
    """Why the script's own wishes, or what it did with the module, keep it whole; empty if nothing does.

    ``hooks``: whether its hooks do.
    """
    if _is_wanted_whole(model, name):
        return _WANTED
    return (
        "it has hooks, or its forward was replaced" if _is_altered(model.get_submodule(name), hooks) else ""
    )


def owners_of(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter, by its id, the modules that have it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _is_altered(module: nn.Module, hooks: bool = True) -> bool:
    """True if somebody does something of his own around the module's calls, or with gradients of its parameters;
    ``hooks``: whether hooks around its calls count."""
    hooked = is_hooked(module) if hooks else any(map(has_gradient_hooks, module.parameters(recurse=False)))
    return hooked or "forward" in vars(module) or is_compiled(module)


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
    """The smallest modules that hold all linears between which tensors are sharded."""
    group = {name: {name} for name in trial.kinds}
    for fed, sources in trial.fed.items():
        members = set().union(*(group[name] for name in {fed, *sources}))
        for name in members:
            group[name] = members
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
