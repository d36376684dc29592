"""Models that are alike are split alike, so that ``zip(target.variables, model.variables)`` pairs the same layers.

A target network, an average of a model or a twin has the variables of another model, in its order. Two variables at one
place belong to one partition, whichever step uses them, and units that use them come side by side. Where that would
leave a partition without variables, models are split as if they were not alike, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from weft.tensorflow import private
from weft.tensorflow.session.session import name_of
from weft.tensorflow.split.units import Units, make_units, variable_sets
from weft.tensorflow.trace.operations import Record

Kind = tuple[Any, ...]


def alike(one: Any, other: Any) -> list[tuple[int, int]]:
    """The keys of the variables at the same places of two models; nothing if the models are not alike.

    They are if each variable of the model with fewer has the shape, the type and the kind ("kernel") of the other's.
    """
    mine, theirs = _variables(one), _variables(other)
    pairs = [(key, key_of_other) for (key, _), (key_of_other, _) in zip(mine, theirs, strict=False)]
    same = all(kind == kind_of_other for (_, kind), (_, kind_of_other) in zip(mine, theirs, strict=False))
    shared = {key for key, _ in mine} & {key for key, _ in theirs}
    return pairs if same and not shared else []


def _variables(model: Any) -> list[tuple[int, Kind]]:
    """The keys of a model's variables, and what each is like."""
    try:
        variables = model.all_variables() if hasattr(model, "all_variables") else model.variables
    except ValueError:  # a model of tf_keras that is not built
        return []
    return [
        (
            private.key_of(private.handle_of(each)),
            (tuple(each.shape), str(each.dtype), name_of(each).rpartition("/")[2]),
        )
        for each in variables
    ]


def at_one_place(models: Iterable[Any]) -> list[tuple[int, int]]:
    """The keys of variables that stand at one place of models that are alike, two by two."""
    return [pair for one, other in combinations(models, 2) for pair in alike(one, other)]


def with_twins(owners: Mapping[int, int], models: Iterable[Any]) -> dict[int, int]:
    """The partitions of variables by their keys, and of those that stand at the same places of models without any."""
    found = dict(owners)
    for one, other in permutations(models, 2):
        pairs = [pair for pair in alike(one, other) if pair[0] in owners and pair[1] not in owners]
        if {owners[known] for known, _ in pairs} == set(
            one.owners.values()
        ):  # not the first layers of a long one
            for known, unknown in pairs:
                found.setdefault(unknown, owners[known])
    return found


def fixed_of(record: Record, known: Mapping[int, int], wished: Mapping[int, int]) -> dict[int, int]:
    """The partition of each variable that has one, or shall have that of a model that is alike; by their numbers."""
    found: dict[int, int] = {}
    for variables in variable_sets(record):
        places = [where[each] for where in (known, wished) for each in variables if each in where]
        found |= dict.fromkeys(variables if places else (), next(iter(places), 0))
    return found | dict(known)


def units_of(
    record: Record, pairs: Sequence[tuple[int, int]], known: Mapping[int, int], partitions: int
) -> Units:
    """The units of a step, with those together whose variables stand at one place of models that are alike.

    Args:
        record: The step.
        pairs: Such variables, two by two, by their numbers.
        known: The partition of each variable that has one already, by its number.
        partitions: How many there are.
    """
    free = make_units(record)
    wanted = [
        (one, other)
        for one, other in pairs
        if known.get(one, known.get(other)) == known.get(other, known.get(one))
    ]
    if not wanted:
        return free
    record.alike = wanted
    tied = make_units(record)
    if _groups(tied) < min(partitions, _groups(free)):
        record.alike = []
        return free
    return tied


def _groups(units: Units) -> int:
    """The number of partitions that could have variables."""
    return len({unit.group or unit.name for unit in units.graph.units if unit.parameter_bytes})


def twins_of(used: Sequence[Any], models: Iterable[Any], owners: Mapping[int, int]) -> list[Any]:
    """The models whose partitions are known before a step has called them."""
    return [
        model
        for model in models
        if model not in used and not model.partitioned and any(key in owners for key, _ in _variables(model))
    ]


def differing_twins(models: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """Models that have the variables of one of the ``new`` ones, and not on the same ranks, in words."""
    split = [each for each in models if each.partitioned]
    reasons = [
        f"{one.module.name} and {other.module.name} are alike, and their variables lie on different partitions"
        for one, other in combinations(split, 2)
        if (one in new or other in new)
        and any(one.owners.get(a) != other.owners.get(b) for a, b in alike(one, other))
    ]
    of_models = {key for model in models for key, _ in _variables(model)}
    for plain in private.plain_models():
        mine = _variables(plain)
        twin = next(
            (each for each in new if len(each.all_variables()) == len(mine) and alike(plain, each)), None
        )
        if twin is not None and not of_models & {key for key, _ in mine}:
            reasons.append(
                f"{plain.name} is alike to {twin.module.name}, which is split, and is whole on each rank; hand it over "
                "to weft.DistributedModel, too"
            )
            break
    return [f"{each}: {PAIRS}" for each in reasons]


PAIRS = (
    "zip(one.variables, other.variables) outside of a step pairs those of different layers, so update one from the "
    "other inside of a step"
)
