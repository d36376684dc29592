"""The older style's ``DistributedDataParallel``."""

from weft.compat.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
