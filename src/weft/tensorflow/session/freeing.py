"""Variables of other partitions, whose values this rank gives up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.tensorflow import private
from weft.tensorflow.session.session import session


def free_others(models: Sequence[Any]) -> None:
    """Give back the memory of all variables of ``models`` that another partition owns.

    Their handles, and with these their keys, are others afterwards; the models know. A variable that no step has used
    yet is of no partition, and keeps its value on every rank.
    """
    own = session().position("pp")
    for model in models:
        for variable in model.all_variables():
            owner = model.owner_of(variable)
            if owner is None or owner == own or not (is_here(variable) or private.waits(variable)):
                continue
            former = private.key_of(private.handle_of(variable))
            private.free(variable, f"{name_of(variable)}, a variable of partition {owner}")
            for each in models:
                each.follow(former, private.key_of(private.handle_of(variable)))


def is_here(variable: Any) -> bool:
    """True if a variable has a value on this rank."""
    return not private.uninitialised(private.underlying(variable))


def name_of(variable: Any) -> str:
    """The name of a variable of Keras (its path) or of TensorFlow."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])
