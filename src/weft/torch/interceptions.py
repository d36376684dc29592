"""Replacements of functions of PyTorch while weft runs a script: put in place once, for the process."""

from __future__ import annotations

from weft.torch import clip
from weft.torch.execution import entry_points
from weft.torch.optimizer import bring_weights_for_steps, warn_of_plain_optimizers
from weft.torch.pytorch import lost_arguments
from weft.torch.replicas.sync_batch_norm import without_counting_again


def install() -> None:
    """Put the interceptions in place; a second call changes nothing."""
    if entry_points.install((*clip.REPLACED, *lost_arguments.REPLACED), without_counting_again):
        warn_of_plain_optimizers()
        bring_weights_for_steps()
