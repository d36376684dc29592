"""The content of a save, by names that do not depend on the split.

    <model>/<variable>                   each variable, by the rank that owns it
    <optimizer>/<variable>/<slot>        what an optimizer keeps for a variable, by the rank that owns the variable
    <optimizer>@<partition>/<name>       its other variables, such as ``iteration``: a partition without gradients of
                                         its own may have counted less
    variables/<name>                     variables of the script
    user/...                             tensors of the user's content

``<model>`` is "model" where there is one, else "model-<name>"; likewise "optimizer".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from weft.checkpoint.shard import Part
from weft.errors import CheckpointError, UsageError
from weft.tensorflow import private
from weft.tensorflow.checkpoint.held import reading
from weft.tensorflow.session.session import Session, name_of, session
from weft.untrusted import listed

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

    Keras shows only by its name whose slot a variable is: the optimizer's name, the other variable's and the slot's.
    Several of one name come in the order of the variables that the optimizer was built for. Slots with names of their
    own (Adafactor's rows and columns) are found by the optimizer's lists that have one entry for each of these.
    """
    names = {id(variable): name for name, variable in named.items()}
    in_lists = private.listed_by(optimizer)
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
        if name is None and id(variable) in in_lists:
            of, slot = in_lists[id(variable)]
            name = names.get(id(of))
        if name is None:
            own.append((name_of(variable).rpartition("/")[2], variable))
        else:
            slots[f"{name}/{slot}"] = variable
    return slots, numbered(own)


def check_known(joined: Session, optimizer: Any, own: Mapping[str, Any]) -> None:
    """Refuse to save tensors of an optimizer that are kept for trained variables, when nobody can say for which.

    Raises:
        CheckpointError: There are some, and other partitions have others under the same names.
    """
    paths = [name_of(each) for each in own.values()]  # an optimizer inside another one has a path of its own
    unknown = [name for name, each in own.items() if len(each.shape) or paths.count(name_of(each)) > 1]
    if unknown and joined.settings.partitions > 1:
        kind = type(optimizer).__name__
        raise CheckpointError(
            f"{kind} keeps {listed(unknown)}, and nothing says for which weights: not saved. Make it by "
            "add_variable_from_reference in build(), or keep it in a list with one entry for each trained variable"
        )


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


FRAMEWORK = "tensorflow"


@dataclass(frozen=True)
class Contents:
    """The content to save: models and optimizers by section, variables of the script by name."""

    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    variables: Mapping[str, Any]

    @classmethod
    def of(cls, things: Mapping[str, Any]) -> Contents:
        """Models, optimizers and variables by any names; also lists and dicts of them, and whatever has variables.

        Raises:
            UsageError: There are things that cannot be saved; all of them are named.
        """
        models: dict[str, Any] = {}
        optimizers: dict[str, Any] = {}
        variables: list[tuple[str, Any]] = []
        wrong: list[str] = []
        for name, thing in _flat(things):
            model = model_of(thing)
            if model is not None:
                models[name] = model
            elif hasattr(thing, "apply_gradients") and hasattr(type(thing), "variables"):
                optimizers[name] = thing
            elif isinstance(thing, (tf.Variable, keras.Variable)):
                variables.append((name, thing))
            elif isinstance(getattr(thing, "variables", None), (list, tuple)):
                variables += [(f"{name}.{each}", it) for each, it in name_variables(thing.variables).items()]
            else:
                wrong.append(f"{name} is a {type(thing).__name__}")
        if wrong:
            raise UsageError(
                f"{'; '.join(wrong)}: a checkpoint takes models, optimizers, metrics and variables; make numbers a "
                "tf.Variable"
            )
        return cls(_sections("model", models), _sections("optimizer", optimizers), numbered(variables))

    def named(self, section: str) -> dict[str, Any]:
        """All variables of one model by name."""
        return name_variables(self.models[section].all_variables())

    def trainable(self) -> dict[str, Any]:
        """The variables of all models that may have slots in an optimizer: by name, with the section if there are
        several."""
        found: dict[str, Any] = {}
        for section, model in self.models.items():
            start = "" if len(self.models) == 1 else f"{section}/"
            found |= {f"{start}{name}": each for name, each in name_variables(model.all_variables()).items()}
        return {name: each for name, each in found.items() if each.trainable}

    def owner_of(self, variable: Any) -> int | None:
        """The partition of a variable; None if every rank has it."""
        owners = (model.owner_of(variable) for model in self.models.values())
        return next((owner for owner in owners if owner is not None), None)


def _flat(things: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, thing in things.items():
        if isinstance(thing, Mapping):
            found += _flat({f"{name}.{key}": item for key, item in thing.items()})
        elif isinstance(thing, (list, tuple)):
            found += _flat({f"{name}.{number}": item for number, item in enumerate(thing)})
        else:
            found.append((name, thing))
    return found


def model_of(thing: Any) -> Any:
    """The ``DistributedModel`` that a thing is, or that wraps it; None if there is none."""
    return next((model for model in session().models if thing is model or thing is model.module), None)


def _sections(kind: str, things: Mapping[str, Any]) -> dict[str, Any]:
    alone = len(things) == 1
    return {kind if alone else f"{kind}-{name}": thing for name, thing in things.items()}


def add(part: Part, joined: Session, contents: Contents) -> None:
    """Add this rank's share of the contents. What every rank has, the first partition adds."""
    here = joined.position("pp")
    first = here == 0
    for section in contents.models:
        for name, variable in contents.named(section).items():
            if (contents.owner_of(variable) or 0) == here:
                part.tensors[f"{section}/{name}"] = variable
    if first:
        part.tensors |= {f"variables/{name}": each for name, each in contents.variables.items()}
    trained: dict[str, Any] = {}
    named = contents.trainable()
    mine = {name for name, variable in named.items() if (contents.owner_of(variable) or 0) == here}
    for section, optimizer in contents.optimizers.items():
        slots, own = optimizer_state(optimizer, named)
        check_known(joined, optimizer, own)
        for path, variable in slots.items():
            if path.rpartition("/")[0] in mine:
                part.tensors[f"{section}/{path}"] = variable
        part.tensors |= {f"{section}@{here}/{name}": each for name, each in own.items()}
        known = {id(each) for each in private.trained_by(optimizer)}
        trained |= {f"{section}/{name}": {} for name in mine if id(named[name]) in known}
    part.content["optimizer_values"] = trained
    if first:
        part.content["framework"] = FRAMEWORK
        part.content["names"] = {section: list(contents.named(section)) for section in contents.models}
        part.content["optimizers"] = {
            section: type(optimizer).__name__ for section, optimizer in contents.optimizers.items()
        }
