"""Data parallelism under the name that existing scripts import."""

from typing import NoReturn

from weft.compat.refused import refuse_unknown

__version__ = "1.8.0"


def __getattr__(name: str) -> NoReturn:
    refuse_unknown(__name__, name)
