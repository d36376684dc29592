"""Names that existing scripts import: ``smdistributed`` and its parts, and ``torch.sagemaker``.

Nothing is installed under those names. ``weft run --smdistributed``, ``weft-python`` and :func:`enable` put them on the
path of the processes that ask for them, and of their children.
"""

from __future__ import annotations

from weft.compat.enable import enable, launch_environ

__all__ = ["enable", "launch_environ"]
