"""``import horovod.tensorflow.keras as hvd``: the same names, and callbacks."""

from weft.compat.tensorflow.horovod import *  # noqa: F403
from weft.tensorflow.data_parallel import keras as callbacks

__all__ = ["callbacks"]
