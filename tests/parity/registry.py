"""The checks of a script that several ranks run: functions by name, each of which asserts for itself.

CHECKS = Checks()

@CHECKS.check
def objects_travel() -> None: ...

if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], start)
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.counted_costs import count_costs

Check = TypeVar("Check", bound=Callable[[], Any])


class Checks(dict[str, Callable[[], Any]]):
    """Functions without arguments, by their names.

    Attributes:
        given: What the script was called with: see `run`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given = argparse.Namespace()

    def check(self, function: Check) -> Check:
        """Makes a function one of the checks, under its own name."""
        if function.__name__ in self:
            raise ValueError(f"two checks named {function.__name__}")
        self[function.__name__] = function
        return function

    def of_each(self, *names: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
        """Makes a check of a function for each of `names`, which it is called with."""

        def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
            self.update({f"{function.__name__}[{name}]": functools.partial(function, name) for name in names})
            return function

        return register

    def run(self, arguments: Sequence[str], start: Callable[[], object]) -> None:
        """Runs checks one after the other, after `start`, with splits and chance that repeat. Prints each that passed.

        [--folder FOLDER] [--partitions N] [--pipeline NAME] [check...]      no check means all
        """
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", type=Path, help="for what the checks write")
        parser.add_argument("--partitions", type=int, default=1)
        parser.add_argument("--pipeline", default="1f1b")
        parser.add_argument("checks", nargs="*")
        parser.parse_args(arguments, self.given)
        if unknown := [name for name in self.given.checks if name not in self]:
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(self)}")
        torch.set_num_threads(1)
        count_costs()
        start()
        for name in self.given.checks or self:
            torch.manual_seed(0)
            self[name]()
            print(f"{name}: passed", flush=True)
