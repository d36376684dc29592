"""Starts jobs of ranks that use TensorFlow; they are forked from a process that has imported it, and done no more.

A process that has imported TensorFlow and Keras can be forked as long as it has made no context: no tensor, no
operation, no list of devices. Jobs whose start is tested begin cold: `tests.launching.run_ranks` without `warm`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import warm

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1"}
WARM = "tensorflow"
"""The flavour of `tests.warm` with TensorFlow."""


def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> warm.Job:
    """Start `weft ARGUMENTS` with variables in a folder."""
    return warm.start(arguments, {**env, **QUIET}, cwd, WARM)


def run(arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float) -> tuple[int, str]:
    """The same to its end: the exit code and what it wrote; minus SIGKILL if it took `timeout` seconds."""
    return warm.run(arguments, {**env, **QUIET}, cwd, timeout, WARM)


def checks_of(worker: str) -> list[str]:
    """The checks of a worker in this folder, which is read: an import would bring TensorFlow into this process."""
    found = []
    for node in ast.parse(Path(__file__).with_name(worker).read_text()).body:
        for each in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if ast.unparse(each) == "check":
                found.append(node.name)
            elif isinstance(each, ast.Call) and ast.unparse(each.func) == "check.of_each":
                found += [f"{node.name}[{ast.literal_eval(name)}]" for name in each.args]
    return found
