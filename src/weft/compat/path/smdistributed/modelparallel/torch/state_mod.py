"""``smp.state`` where some scripts import it from."""

from weft.compat.modelparallel.session import state

__all__ = ["state"]
