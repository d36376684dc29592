"""Findings about a script that would hurt when it is distributed, from its text: the script is neither imported nor
run.

check_script(path, given)   findings, each with its line, the reason and the line to write
read_script(path, given)    the script as the rules see it
"""

from __future__ import annotations

from weft.check.finding import Finding, Grade, as_json, as_text
from weft.check.script import Given, Script, read_script
from weft.check.table import RULES, check_script

__all__ = [
    "RULES", "Finding", "Given", "Grade", "Script", "as_json", "as_text", "check_script", "read_script",
]  # fmt: skip
