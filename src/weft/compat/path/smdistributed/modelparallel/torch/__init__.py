"""``import smdistributed.modelparallel.torch as smp``."""

from typing import Any

from smdistributed.modelparallel import __version__ as __version__
from smdistributed.modelparallel.torch import amp as amp
from smdistributed.modelparallel.torch import core as core
from smdistributed.modelparallel.torch import model as model
from smdistributed.modelparallel.torch import nn as nn
from smdistributed.modelparallel.torch import optimizers as optimizers
from smdistributed.modelparallel.torch import patches as patches
from smdistributed.modelparallel.torch import state_mod as state_mod
from smdistributed.modelparallel.torch import utils as utils
from weft.compat.later import PLACES, later
from weft.compat.modelparallel.interface import *  # noqa: F403
from weft.compat.refused import refuse_unknown

_GROUPS = ("WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP")
_RANK_TYPES = ("WORLD_RANK", "MP_RANK", "DP_RANK", "TP_RANK", "PP_RANK", "RDP_RANK")


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        return getattr(later("CommGroup"), name)
    if name in _RANK_TYPES:
        return getattr(later("RankType"), name)
    if name in PLACES:
        return later(name)
    return refuse_unknown(__name__, name)
