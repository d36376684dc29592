"""``import smdistributed.modelparallel.tensorflow as smp``."""

from typing import Any

from weft.compat.refused import need_tensorflow, refuse_unknown

need_tensorflow(__name__)

from smdistributed.modelparallel import __version__ as __version__  # noqa: E402
from smdistributed.modelparallel.tensorflow import core as core  # noqa: E402
from smdistributed.modelparallel.tensorflow import utils as utils  # noqa: E402
from weft.compat.tensorflow.interface import *  # noqa: E402, F403
from weft.compat.tensorflow.optimizers import install as _install  # noqa: E402

_install()


def __getattr__(name: str) -> Any:
    if name == "CheckpointManager":
        from weft.tensorflow.checkpoint.manager import CheckpointManager

        return CheckpointManager
    return refuse_unknown(__name__, name)
