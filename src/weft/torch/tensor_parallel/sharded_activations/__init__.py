"""Tensors between cut modules of which each rank has a part: scores up to the loss, tokens between regions."""

from . import losses, rules  # noqa: F401  (they fill the table of rules)
from .sequence import Narrowed, can_scatter, enters, narrowed, scattered
from .tensor import AllGathered, ShardedActivation, may_spread, plain, spread
from .watch import SCORES, TOKENS, watch

__all__ = [
    "SCORES", "TOKENS", "AllGathered", "Narrowed", "ShardedActivation", "can_scatter", "enters", "may_spread",
    "narrowed", "plain", "scattered", "spread", "watch",
]  # fmt: skip
