"""Writing a model down, and comparing one with what was written."""

from weft.compat.written import dump_model, verify

__all__ = ["dump_model", "verify"]
