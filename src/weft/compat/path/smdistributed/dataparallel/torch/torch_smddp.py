"""Importing this registers the backend ``smddp``."""

from weft.compat.smddp import register

register()
