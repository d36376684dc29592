"""Values of one replica for all of them: tensors, and variables for the start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow.replicas import average
from weft.tensorflow.session.session import session


@tf.autograph.experimental.do_not_convert
def broadcast(tensor: Any, root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """The tensor of replica ``root_rank`` on all of them; every replica calls it, with one of that shape and type."""
    return average.broadcast([tensor], root_rank, session(), axis)[0]


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """Give variables the values that they have on replica ``root_rank``; every replica calls it with the same ones.

    Call it when the variables are there, for those of an optimizer after the first batch.
    """
    return average.broadcast_variables(list(variables), root_rank, session(), axis)


def broadcast_global_variables(root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """The operation that gives all variables of a graph of TensorFlow 1 their values on replica ``root_rank``.

    Raises:
        UsageError: There is no such graph.
    """
    if tf.executing_eagerly():
        raise UsageError(
            "broadcast_global_variables is for graphs of TensorFlow 1: call broadcast_variables(model.variables, "
            "root_rank=0), and the same with the optimizer's, after the first batch"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, axis=axis)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Runs :func:`broadcast_global_variables` when a session of TensorFlow 1 has begun."""

    def __init__(self, root_rank: int = 0, device: str = "", *, axis: str = "rdp") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._axis = axis
        self._operation: Any = None

    def begin(self) -> None:
        """Make the operation, before the graph is closed."""
        self._operation = broadcast_global_variables(self._root_rank, axis=self._axis)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._operation)
