"""``smdistributed.modelparallel.tensorflow.v1``: the same names, where scripts for TensorFlow 1 look for them."""

from weft.compat.tensorflow.interface import *  # noqa: F403
