"""``smp.optimizers``: the optimizers that the original takes from apex."""

from weft.compat.modelparallel.optimizers import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
