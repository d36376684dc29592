"""Mixtures of experts: each rank has some of the experts, or a part of every one.

Experts may be modules: ``mixtures`` finds those that ranks can share out, ``held`` runs them. Or their weights may be
one tensor, ``[experts, results, inputs]``: ``parts`` runs such a module on what a rank has of it. ``find`` says what
sums to the full result: it computes both and compares, on a ``bench``.
"""

from .expert_parallel import Mixture, cuts_of_mixture, members, misfit_of_mixture
from .find import around_lonely, candidates, find_experts, lonely
from .mixtures import find_mixtures, shares_out
from .sharded_experts import cuts_of_experts, misfit, run_sharded

__all__ = [
    "Mixture", "around_lonely", "candidates", "cuts_of_experts", "cuts_of_mixture", "find_experts", "find_mixtures",
    "lonely", "members", "misfit", "misfit_of_mixture", "run_sharded", "shares_out",
]  # fmt: skip
