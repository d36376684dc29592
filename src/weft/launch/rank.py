"""The first lines of a rank under `weft run`: from here on errors reach the launcher, wherever the script is.
Ranks of mpirun are given the variables by which plain PyTorch finds the others.

    python rank.py script.py arguments ...
    python rank.py --module package.train arguments ...

The script finds what it would find if Python had started it: its arguments, its folder on the path, itself as
`__main__`. It is started by its path, so that a folder called `weft` beside the script is nothing to this file.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, TracebackType

FILE = os.path.abspath(__file__)
MODULE = "--module"


def main() -> None:
    """Runs the script; an exception that it does not catch is reported as its hook says, and ends the process."""
    from weft.launch.environ import torchrun_environ
    from weft.watch import before_init

    os.environ |= torchrun_environ(os.environ)
    before_init.report_uncaught(_rank())
    try:
        run_script()
    except SystemExit as error:
        before_init.report_exit(error.code)
        raise
    except BaseException as error:
        trace = own_trace(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def run_script() -> None:
    """Runs the script that this process's arguments name, as if Python had started it."""
    as_module = sys.argv[1] == MODULE
    del sys.argv[: 2 if as_module else 1]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if as_module else os.path.dirname(os.path.realpath(script)))
    if as_module or script.endswith(".pyc") or _is_archive(script):
        _run_by_name(script, as_module)
    else:
        _run(script)


def own_trace(error: BaseException) -> TracebackType | None:
    """The traceback of an exception of the script, from the script's first line."""
    trace = error.__traceback__
    while trace is not None and _ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _rank() -> int | None:
    """This process's, if its launcher is not weft's and says so: it leaves what it has to say in a folder."""
    from weft.errors import LaunchError
    from weft.launch.discovery import SHARED_FD, discover
    from weft.watch.statement import FOLDER

    if FOLDER not in os.environ or SHARED_FD in os.environ:
        return None
    try:
        return discover(os.environ).rank
    except LaunchError:
        return None


def _is_archive(script: str) -> bool:
    with open(script, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _run_by_name(script: str, as_module: bool) -> None:
    import runpy

    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _run(script: str) -> None:
    """The script in the module `__main__` itself, as Python does it."""
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code: CodeType = loader.source_to_code(loader.get_data(path), path)
    space = sys.modules["__main__"].__dict__
    builtins = space["__builtins__"]
    space.clear()
    space.update(
        __name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None, __file__=path,
        __cached__=None, __builtins__=builtins, __annotations__={},
    )  # fmt: skip
    exec(code, space)


def _ours(file: str) -> bool:
    return file.startswith("<frozen") or file in (FILE, main.__code__.co_filename)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    from weft.launch.rank import (
        main as run_rank,
    )  # what is defined here goes, as the script becomes `__main__`

    run_rank()
