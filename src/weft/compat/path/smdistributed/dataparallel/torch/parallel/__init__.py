"""The older style's ``DistributedDataParallel``."""

from weft.compat.dataparallel.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
