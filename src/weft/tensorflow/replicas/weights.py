"""The weight of a microbatch, where a model has replicas: by what Keras divides a loss by, over all of them.

With D_r what the loss of replica r is divided by, one process has the mean by weights D_r / sum of D. An average over n
replicas divides by n, so replica r counts n D_r / sum of D. Where a loss is divided by nothing, replicas add up: n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from weft.tensorflow.replicas.average import all_reduce
from weft.tensorflow.session.session import Session
from weft.tensorflow.trace.denominators import NOTHING, Reduction, count_of, weights_of


class Weights:
    """The weights of the microbatches of one call of a step.

    ``shares``: those of the samples.
    """

    def __init__(self, session: Session, shares: Sequence[Any]) -> None:
        self._session, self._shares = session, shares
        self._parts: dict[int, Any] = {}

    def of_replica(self, reduction: Reduction | None, denominators: Sequence[Any]) -> list[Any]:
        """Those of a number of this replica."""
        return weights_of(reduction, denominators, self._shares)

    def of_all(self, reduction: Reduction | None, denominators: Sequence[Any]) -> list[Any]:
        """Those of a number that is averaged over the replicas; all of them ask for it."""
        weights = self.of_replica(reduction, denominators)
        if reduction is None or self._session.mesh.rdp == 1:
            return weights
        if id(reduction) not in self._parts:
            self._parts[id(reduction)] = self._part(reduction, denominators)
        part = self._parts[id(reduction)]
        return [each * (tf.cast(part, each.dtype) if tf.is_tensor(part) else part) for each in weights]

    def _part(self, reduction: Reduction, denominators: Sequence[Any]) -> Any:
        if reduction.kind == NOTHING:
            return float(self._session.mesh.rdp)
        own = count_of(denominators, self._shares)
        return tf.math.divide_no_nan(own, all_reduce(own, "average", self._session))
