"""A function of a notebook on several ranks: fresh processes, live output, interrupts, and what rank 0 returns.

notebook      writes the function into a private folder -> `weft run -m weft.launch.running.notebook_rank FOLDER`
each rank     reads it, calls it; rank 0 writes what it returns
"""

from __future__ import annotations

import codecs
import importlib
import inspect
import json
import linecache
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, TextIO, TypeVar

from weft.errors import LaunchError, UsageError
from weft.untrusted import MOST_RANKS, shown
from weft.watch.process import die_with_parent

MODULE = "weft.launch.running.notebook_rank"
JOB, RESULT = "job", "result"
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WEFT_SHARED_FD")
_LINES = 40
T = TypeVar("T")


def notebook_run(
    function: Callable[..., T],
    *arguments: Any,
    ranks: int = 2,
    settings: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
) -> T:
    """Runs ``function(*arguments)`` on ``ranks`` fresh processes, and returns what rank 0 returns.

    The function may be one of a notebook's cells, or typed into Python. It calls ``weft.init()`` itself, as a script
    does. What it uses of the notebook is copied. What the ranks print appears at once, and an interrupt ends them.
    Nothing of this process is shared with them: it may have used a GPU, or threads.

    Needs the extra ``notebook``, which is cloudpickle.

    Args:
        function: What each rank calls.
        arguments: What it is given, the same on each rank.
        ranks: How many processes, on this machine.
        settings: Settings of weft, which win over those that the function gives to ``weft.init``.
        options: More options of ``weft run``, for example ``["--device", "cpu"]``.

    Raises:
        UsageError: The function cannot be copied to another process, cloudpickle is not installed, or this process is
            a rank itself.
        LaunchError: A rank failed; what it said was printed before.
    """
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"ranks is {shown(ranks)}: write a whole number of at least 1")
    if not callable(function):
        raise UsageError(f"notebook_run was given {shown(function)}: give it a function, without calling it")
    if variables := [name for name in _OF_A_RANK if name in os.environ]:
        raise UsageError(
            f"this process is a rank of a job ({variables[0]} is set): notebook_run is for a process that is none"
        )
    packed = pack((function, arguments, sources(function)), getattr(function, "__name__", "the function"))
    with tempfile.TemporaryDirectory(prefix="weft-notebook-") as name:  # only this user can read it
        folder = Path(name)
        (folder / JOB).write_bytes(packed)
        chosen = ["--config", json.dumps(dict(settings))] if settings else []
        run = [sys.executable, "-m", "weft", "run", "-n", str(ranks), *chosen, *options, "-m", MODULE, name]
        said = _followed(run)
        return unpack(folder / RESULT, said)


def cloudpickle() -> ModuleType:
    """The package that copies functions by what they do, not by where they are."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise UsageError("notebook_run needs cloudpickle: pip install 'weft[notebook]'") from error


def pack(value: object, what: str) -> bytes:
    """A value for another process.

    Raises:
        UsageError: It cannot be copied: a lock, an open file, a generator.
    """
    tool = cloudpickle()
    try:
        return bytes(tool.dumps(value))
    except Exception as error:  # each kind of object has errors of its own
        raise UsageError(
            f"{what} cannot be copied to another process: {error}; make inside of the function what it needs of that"
        ) from error


Sources = Mapping[str, tuple[str, Sequence[str]]]
"""By the name of a function its file, and that file's lines."""


def sources(function: Any) -> Sources:
    """Where a function and those beside it were written: the copy has no file, and neither have its cells there."""
    beside = getattr(function, "__globals__", {}).items()
    found = {}
    for name, each in (("", function), *beside):
        if isinstance(each, FunctionType) and each.__module__ == "__main__":
            with suppress(OSError, TypeError):  # typed in where nothing keeps it
                lines = inspect.findsource(each)[0]
                found[name] = (each.__code__.co_filename, lines)
    return found


def give_sources(function: Any, given: Sources) -> None:
    """Let copied functions know their lines again: for error messages, and for AutoGraph, which reads them."""
    for name, (file, lines) in given.items():
        each = function.__globals__.get(name) if name else function
        if isinstance(each, FunctionType) and not os.path.exists(each.__code__.co_filename):
            linecache.cache[file] = (sum(map(len, lines)), None, list(lines), file)
            each.__code__ = _in_file(each.__code__, file)


def _in_file(code: CodeType, file: str) -> CodeType:
    """The code, and that of the functions in it, as of a file."""
    inside = tuple(_in_file(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=inside)


def unpack(path: Path, said: str) -> Any:
    """The object that a rank of our own wrote."""
    if not path.exists():
        raise LaunchError(f"no rank returned anything{f': {said}' if said else ''}")
    return cloudpickle().loads(path.read_bytes())


def _followed(command: Sequence[str]) -> str:
    """Runs a job to its end while what it says appears here; its last words.

    Raises:
        LaunchError: It failed.
        KeyboardInterrupt: It was interrupted, and has ended.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    interrupted, said = False, ""
    with process, selectors.DefaultSelector() as selector:
        decoder = codecs.getincrementaldecoder("utf-8")
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder("replace")))
        while selector.get_map():
            try:
                said = _shown(selector, said)
            except KeyboardInterrupt:
                interrupted = True
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        line = next((line for line in said.splitlines() if line.startswith("weft")), "see what was printed")
        raise LaunchError(f"the job ended with exit code {process.returncode}: {line.removeprefix('weft: ')}")
    return said


def _shown(selector: selectors.BaseSelector, said: str) -> str:
    """Shows what has come; all that was said to the standard error, but for the oldest."""
    for key, _ in selector.select():
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
        stream: TextIO = key.data[0]
        data = os.read(pipe.fileno(), 1 << 16)
        text = key.data[1].decode(data, final=not data)
        stream.write(text)
        stream.flush()
        if stream is sys.stderr:
            said = "\n".join((said + text).split("\n")[:_LINES])
        if not data:
            selector.unregister(pipe)
    return said
