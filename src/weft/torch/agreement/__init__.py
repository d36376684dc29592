"""Rates, scales, states and weights that all ranks must have alike, though a script can set them on one rank alone.

    before the first step    everybody gets what the first rank has                          ``first_rank``
    at each later step       every rank sends what it has: rates, loss scales, loads,        ``settings``
                             and digests of weights that something else than an optimizer
                             has written                                                     ``written``

What a rank sends goes along with messages that are sent anyway, so it costs no time of its own. Ranks that differ end
with an error that names the value and the ranks.
"""

from weft.torch.agreement.first_rank import follow_first_rank
from weft.torch.agreement.settings import Agreement

__all__ = ["Agreement", "follow_first_rank"]
