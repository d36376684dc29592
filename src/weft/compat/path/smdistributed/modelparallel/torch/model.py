"""``smp.model.DistributedModel``, for ``isinstance``."""

from weft.compat.modelparallel.model import DistributedModel

__all__ = ["DistributedModel"]
