"""``import horovod.tensorflow as hvd``."""

from weft.compat.refused import need_tensorflow

need_tensorflow(__name__)

from weft.compat.tensorflow.horovod import *  # noqa: E402, F403
from weft.compat.tensorflow.optimizers import install as _install  # noqa: E402

_install()
