"""Runs before a script that was started by ``weft run --smdistributed`` or ``weft-python``; then the usual one does."""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))


def _usual() -> None:
    """The ``sitecustomize`` that this one hides, if there is one."""
    rest = [part for part in sys.path if os.path.abspath(part or ".") != _folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    from weft.compat import enable
except ImportError:  # another Python, without weft
    pass
else:
    enable()
_usual()
