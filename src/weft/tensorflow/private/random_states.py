"""The random states of TensorFlow and Keras that are of no layer and no variable of the script."""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def eager_seeds() -> random.Random | None:
    """The generator of seeds for calls like ``tf.random.normal`` outside of graphs; None where no seed was set."""
    found: random.Random | None = context.context()._rng
    return found


def shared_states() -> dict[str, Any]:
    """The variables with the states of ``tf.random.get_global_generator()`` and of ``keras.random``, as far as they
    were used."""
    keras_own = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    tf_own = stateful_random_ops.global_generator
    return {
        name: thing.state
        for name, thing in (("generator", tf_own), ("keras", keras_own))
        if thing is not None
    }


def make_shared_state(name: str) -> Any:
    """The variable of that name in :func:`shared_states`, made if it is not there."""
    if name == "keras":
        return seed_generator.global_seed_generator().state
    return tf.random.get_global_generator().state
