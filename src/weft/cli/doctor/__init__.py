"""`weft doctor`: whether hosts are fit for a job. What it looks at is in :mod:`weft.launch.doctor`."""

from __future__ import annotations

from weft.cli.doctor.command import add_parser

__all__ = ["add_parser"]
