"""`weft check`: what in a script will hurt when it is distributed."""

from __future__ import annotations

from weft.cli.check.command import add_parser

__all__ = ["add_parser"]
