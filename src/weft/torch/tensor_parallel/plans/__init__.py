"""Plans for tensor parallelism that models bring along, beside what weft has found."""

from .own_plan import beside_own_plan

__all__ = ["beside_own_plan"]
