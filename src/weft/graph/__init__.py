"""The model as data: units in program order, what each costs, and the tensors that flow between them."""

from __future__ import annotations

from weft.graph.model import Graph, Tensor, Unit
from weft.graph.profile_text import read_profile
from weft.graph.transformer import transformer

__all__ = ["Graph", "Tensor", "Unit", "read_profile", "transformer"]
