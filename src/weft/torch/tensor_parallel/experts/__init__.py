"""Experts whose weights are one tensor, ``[experts, results, inputs]``: each rank has a part of every expert.

``parts`` runs such a module on a rank's part of its weights, ``find`` tells which parts give the whole when they are
added up: it computes both and compares.
"""

from .find import candidates, find_experts
from .parts import cuts_of_experts, in_parts, misfit

__all__ = ["candidates", "cuts_of_experts", "find_experts", "in_parts", "misfit"]
