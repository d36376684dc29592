"""`weft plan`: how to divide a job over machines, what that takes, and why not otherwise."""

from __future__ import annotations

from weft.cli.plan.command import add_parser

__all__ = ["add_parser"]
