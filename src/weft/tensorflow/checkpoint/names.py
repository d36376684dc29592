"""Names of variables that do not depend on the split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.tensorflow import private
from weft.tensorflow.checkpoint.held import reading
from weft.tensorflow.session.session import name_of

_COUNTED = re.compile(r"_\d+(?=/|#|$)")


def numbered(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Things by their names; the second one of a name has "#2" behind it.

    >>> numbered([("a", 1), ("b", 2), ("a", 3)])
    {'a': 1, 'b': 2, 'a#2': 3}
    """
    found: dict[str, Any] = {}
    count: dict[str, int] = {}
    for name, thing in pairs:
        count[name] = count.get(name, 0) + 1
        found[name if count[name] == 1 else f"{name}#{count[name]}"] = thing
    return found


def name_variables(variables: Iterable[Any]) -> dict[str, Any]:
    """Variables by their paths in Keras, or their names in TensorFlow."""
    return numbered((name_of(each), each) for each in variables)


def fit(wanted: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """For each wanted name the saved one that it means, or itself; both in the order of the model.

    Where the names are not the same, the numbers do not count that Keras gives to layers without a name: it goes on
    counting with every model of a process.

    >>> fit(["dense_2/bias", "dense_3/bias"], ["dense/bias", "dense_1/bias"])
    {'dense_2/bias': 'dense/bias', 'dense_3/bias': 'dense_1/bias'}
    >>> fit(["a", "b"], ["a", "c"])
    {'a': 'a', 'b': 'b'}
    """
    same = {name: name for name in wanted}
    if set(wanted) == set(saved):
        return same
    theirs = numbered((_COUNTED.sub("", name), name) for name in saved)
    mine = numbered((_COUNTED.sub("", name), name) for name in wanted)
    if mine.keys() != theirs.keys():
        return same
    return {name: theirs[bare] for bare, name in mine.items()}


def optimizer_state(optimizer: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables of an optimizer: those that it keeps for variables of models, and all others.

    The first are ``<name>/<slot>``, such as ``dense/kernel/momentum``; the others have a name without ``/``, such as
    ``iteration``. ``named``: the variables of the models by name, in their order.

    Keras tells only by its name whose slot a variable is: the optimizer's name, the other variable's and the slot's.
    Several of one name come in the order of the variables that the optimizer was built for.
    """
    names = {id(variable): name for name, variable in named.items()}
    trained = [each for each in private.trained_by(optimizer) if id(each) in names] or list(named.values())
    known: dict[str, list[str]] = {}
    for variable in trained:
        known.setdefault(name_of(variable), []).append(names[id(variable)])
    longest_first = sorted(known, key=len, reverse=True)
    slots: dict[str, Any] = {}
    own: list[tuple[str, Any]] = []
    for variable in variables_of(optimizer):
        whose, slot = _whose(variable, longest_first)
        name = next((each for each in known.get(whose, ()) if f"{each}/{slot}" not in slots), None)
        if name is None:
            own.append((name_of(variable).rpartition("/")[2], variable))
        else:
            slots[f"{name}/{slot}"] = variable
    return slots, numbered(own)


def variables_of(optimizer: Any) -> list[Any]:
    """All variables of an optimizer, of Keras 3 or of tf_keras."""
    with reading():
        _ = optimizer.iterations  # which the older kind of tf_keras makes when it is asked for
        found = optimizer.variables
        return list(found() if callable(found) else found)


def _whose(variable: Any, known: Sequence[str]) -> tuple[str, str]:
    """The name of the variable that an optimizer's variable is a slot of, and the slot's; or nothing."""
    name = name_of(variable).partition("/")[2]
    last = name.rpartition("/")[2]
    for each in known:
        flat = f"{each.replace('/', '_')}_"
        for start in (name, last):  # an optimizer in another one has the other's name before its own
            if start.startswith(flat):
                return each, start.removeprefix(flat)
        if name.startswith(f"{each}/"):  # the older kind of tf_keras
            return each, name.removeprefix(f"{each}/")
        if name.endswith(f"/{each}"):  # the newer one
            return each, name.removesuffix(f"/{each}")
    return "", ""
