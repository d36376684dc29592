"""Tensors between cut modules of which each rank has a part: scores up to the loss, tokens between regions."""

from . import losses, rules  # noqa: F401  (they fill the table of rules)
from .sequence import Narrowed, can_scatter, enters, narrowed, scattered
from .tensor import AllGathered, ShardedActivation, may_stay_sharded, plain, sharded_activation
from .watch import SCORES, TOKENS, watch

__all__ = [
    "SCORES", "TOKENS", "AllGathered", "Narrowed", "ShardedActivation", "can_scatter", "enters", "may_stay_sharded",
    "narrowed", "plain", "scattered", "sharded_activation", "watch",
]  # fmt: skip
