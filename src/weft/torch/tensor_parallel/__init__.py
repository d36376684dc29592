"""Tensor parallelism: linears of an unmodified model cut over the ranks of axis ``tp``.

Between a column-parallel linear and a row-parallel one, tensors are PyTorch's ``DTensor``: the
model's own code sees whole shapes, whatever it does with them, and each rank computes its part. Everywhere else tensors
are plain.
``find`` tries out what can be split, ``split`` does it. How a model looks is told by running it, never by its names.
"""

from .apply import split
from .cuts import Cut, axes_of, can_cut, cut, cut_of, full_tensor, is_cut
from .find import find, refuse_whole
from .splits import Linear, Region, Splits

__all__ = [
    "Cut", "Linear", "Region", "Splits", "axes_of", "can_cut", "cut", "cut_of", "find", "is_cut",
    "full_tensor", "refuse_whole", "split",
]  # fmt: skip
