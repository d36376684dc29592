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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from weft.checkpoint.shard import Part
from weft.errors import UsageError
from weft.tensorflow import private
from weft.tensorflow.checkpoint.names import name_variables, numbered, optimizer_state
from weft.tensorflow.session.session import Session, session

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
