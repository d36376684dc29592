"""``smp.init`` and ``smp.state`` for TensorFlow."""

from __future__ import annotations

from weft.compat.state import State
from weft.tensorflow import join

state = State(join)
init = state.init
