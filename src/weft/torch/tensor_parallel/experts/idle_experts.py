"""Experts that the run did not need: what was found of others of the same mixture holds for them, too."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from weft.torch.tensor_parallel.search_trial import UNCALLED, Trial
from weft.torch.tensor_parallel.splits import ROW

_NUMBER = re.compile(r"\d+")


def adopt_uncalled(model: nn.Module, trial: Trial) -> None:
    """Take linears that were not called for what those like them are: the same names but for numbers, the same classes
    and sizes. A row-parallel linear goes with where these come from."""
    missed = {name for name, reason in trial.whole.items() if reason == UNCALLED}
    known: dict[str, str] = {}
    for name, kind in trial.kinds.items():
        if kind == ROW and name in trial.fed:
            known.setdefault(_outline(name), name)
    for name in missed:
        like = known.get(_outline(name))
        if like is None:
            continue
        sources = {_moved(source, like, name) for source in trial.fed[like]}
        pairs = [(name, like), *((_moved(source, like, name), source) for source in trial.fed[like])]
        if not all(own in missed and _alike(model, own, other) for own, other in pairs):
            continue
        for own, other in pairs:
            del trial.whole[own]
            trial.kinds[own] = trial.kinds[other]
            trial.follow(own, other)
            for above, twin in zip(_above(own), _above(other), strict=True):
                if id(model.get_submodule(twin)) in trial.called:  # so is this one, when it is needed
                    trial.called.add(id(model.get_submodule(above)))
        trial.fed[name] = sources


def _outline(name: str) -> str:
    """The name with a star for each number: experts are numbered in any way."""
    return _NUMBER.sub("*", name)


def _moved(name: str, one: str, other: str) -> str:
    """The name with the numbers of ``other`` where it has those of ``one``: what stands there as it stands here."""
    theirs = iter([*zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)])

    def number(found: re.Match[str]) -> str:
        old, new = next(theirs, (None, ""))
        return new if found[0] == old else found[0]

    return _NUMBER.sub(number, name)


def _alike(model: nn.Module, one: str, other: str) -> bool:
    """True if two linears, and what holds them, are of the same classes and sizes."""

    def of(name: str) -> Any:
        module = model.get_submodule(name)
        shapes = [(key, value.shape) for key, value in module.named_parameters()]
        return [type(model.get_submodule(each)) for each in _above(name)], type(module), shapes

    try:
        return bool(of(one) == of(other))
    except AttributeError:
        return False


def _above(name: str) -> list[str]:
    """The modules that hold it, without the model."""
    steps = name.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps))]
