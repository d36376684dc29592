"""Importing this registers the backend ``smddp``."""

from weft.compat.dataparallel.smddp import register

register()
