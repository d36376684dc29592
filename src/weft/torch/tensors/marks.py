"""The names of what weft keeps on tensors and modules of the script."""

from __future__ import annotations

MARK = "_weft_partition"
"""On a module: the partition where the script wants it, and whether by ``set_partition``."""
