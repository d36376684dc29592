"""``smp.model.DistributedModel``, for ``isinstance``."""

from weft.compat.model import DistributedModel

__all__ = ["DistributedModel"]
