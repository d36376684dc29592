"""Averages of fewer bytes: pairs (init, update) that chain, on flat tensors.

compression = weft.reduce.compression.make("int8:block=128")
state = compression.init(numel, dtype, device, ranks)
average = compression.update(state, flat, collective)
"""

from weft.reduce.compression.make import NAMES, make
from weft.reduce.compression.pair import Compression, chain

__all__ = ["NAMES", "Compression", "chain", "make"]
