"""A child for each input, which may take 10 s and 500 MB, and must end with what it read or with an error of weft's."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fuzz_files.mutate import copy_of, mutate_file, pipe
from tests.fuzz_files.samples import Trained, trained, write
from tests.fuzz_files.targets import TARGETS, Target
from weft.errors import WeftError

SECONDS = 10.0
BYTES = 500 << 20
LONGEST = 2000
"""Characters that an error's message may have."""
GOOD = ("right", "read", "refused")


@dataclass(frozen=True)
class Outcome:
    """How an input ended: one of GOOD, or "traceback", "hang", "memory", "fault", "died"."""

    word: str
    target: str
    done: str
    """What was done to the sample."""
    text: str = ""

    @property
    def is_fault(self) -> bool:
        return self.word not in GOOD


class Inputs:
    """Draws inputs by their number and reads them, each in a child of this process."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        torch.set_num_threads(1)
        self.made: Trained = trained()
        write(root / "samples", self.made)

    def run(self, number: int, only: str = "") -> Outcome:
        targets = [target for target in TARGETS if not only or target.name == only]
        target = targets[number % len(targets)]
        draw = random.Random(f"{self.seed}/{number}")
        folder = self.root / "input"
        shutil.rmtree(folder, ignore_errors=True)
        copy_of(self.root / "samples" / "command0", folder / "valid")
        place = copy_of(self.root / "samples" / target.sample, folder / target.name)
        done = self._changed(place, target, draw)
        return Outcome(*self._in_a_child(target, place, done))

    @staticmethod
    def _changed(place: Path, target: Target, draw: random.Random) -> str:
        files = sorted({path for pattern in target.changed for path in place.glob(pattern) if path.is_file()})
        path = draw.choice(files)
        done = mutate_file(path, draw)
        if done.startswith(pipe.__name__) and not target.pipes:
            path.unlink()
        if target.seal is not None:
            target.seal(place)
        return done

    def _in_a_child(self, target: Target, place: Path, done: str) -> tuple[str, str, str, str]:
        read, write_ = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _read(target, place, self.made, write_)
        os.close(write_)
        try:
            content = _all(read, time.monotonic() + SECONDS)
            if content is None:
                os.kill(child, signal.SIGKILL)
                return "hang", target.name, done, f"more than {SECONDS:g} s"
        finally:
            os.close(read)
            _, status, used = os.wait4(child, 0)
        if not content:
            return "died", target.name, done, f"status {status}"
        word, text = json.loads(content)
        return word, target.name, done, text


def _all(descriptor: int, deadline: float) -> bytes | None:
    content = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            return content
        content += part


def _read(target: Target, place: Path, made: Trained, answer: int) -> None:
    """In the child: read the input and say how that went."""
    os.setpgid(0, 0)
    logging.disable(logging.CRITICAL)
    faulthandler.disable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)
    word, text = "died", ""
    try:
        word = target.use(place, made)
    except WeftError as error:
        word, text = "refused", str(error)
        if len(text) > LONGEST:
            word = "fault"
    except BaseException as error:
        word = "memory" if isinstance(error, MemoryError) else "traceback"
        word = "fault" if type(error).__name__ == "FaultError" else word
        text = "".join(traceback.format_exception(error))[-3000:]
    os.write(answer, json.dumps([word, text[:4000]]).encode())
    os._exit(0)


@contextmanager
def inputs(seed: int) -> Iterator[Inputs]:
    """Samples in a folder that goes at the end."""
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-files-", ignore_cleanup_errors=True) as root:
        yield Inputs(Path(root), seed)
