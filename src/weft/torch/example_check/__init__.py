"""Findings about a model that would hurt when it is split, from one run of it in one process, as `weft trace` does.

check_batch    microbatches that do not divide the mini-batch, or leave too few samples
check_shared   modules that share a parameter
check_even     a unit that takes more than an even share
check_run      what nobody uses, and random numbers
"""

from __future__ import annotations

from weft.torch.example_check.batch import check_batch
from weft.torch.example_check.once import check_run
from weft.torch.example_check.placed import check_even, check_shared

__all__ = ["check_batch", "check_even", "check_run", "check_shared"]
