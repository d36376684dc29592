"""Models too big for one process: variables that come into being only where they belong.

A layer of Keras 3 gives each of its initialisers a number as a seed when the layer is made. So a variable has the same
values whenever they are made, and on whichever rank: those of one process. Such variables wait inside of
:func:`delay_param_initialization`, and while a step is traced, for a model that is built when it is called first. They
have a type and a shape, and no memory. After the split each rank makes those of its own partition, one by one.

An initialiser that has a state (a ``SeedGenerator``, a function of the script) is called at once, in the program's
order, on every rank; other ranks' values are given back after the split. So it is with models of ``tf_keras``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weft.errors import CheckpointError
from weft.tensorflow import private
from weft.tensorflow.session.session import session


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Layers built inside take no memory until the partition; then each rank makes its own part only.

    The values are those that the same seed gives without the delay. A variable that is read before it is made then.
    ``load_weights``, inside or afterwards, reads nothing yet: the file stays open, and each rank reads its own part.
    ``enabled=False`` does nothing, so that a flag of the script can decide.
    """
    if not enabled:
        yield
        return
    private.load_when_made()
    with private.variables_wait():
        yield


def make_values(models: Sequence[Any], handles: Sequence[Any], owners: dict[int, int]) -> None:
    """Give values to what waits among the variables of models and the variables behind handles.

    ``owners``: the partition of each variable, by its key; those of other partitions go on without a value.

    Raises:
        CheckpointError: The file that has a value cannot be read any more.
    """
    waiting = private.waiting()
    if not waiting:
        return
    own = session().position("pp")
    variables = [variable for model in models for variable in model.all_variables()]
    keys = {private.key_of(private.handle_of(each)) for each in (*variables, *handles)}
    for variable in waiting:
        key = private.key_of(variable.handle)
        if key in keys and owners.get(key, own) == own:
            try:
                variable.make_value()
            except private.UnreadableTensor as error:
                raise CheckpointError(f"{error}; take another copy of the file") from error
