"""The plan of a job: the commands, environments and files that an engine makes of it, printed without secrets."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MASK = "***"
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL")
_HARMLESS = ("TOKENIZER", "KEYBOARD")
_SHORTEST = 4
"""Shorter secrets are masked where they are given, and not all over a text."""


def is_secret(name: str) -> bool:
    """True if the name of a variable says that its value is nobody's business.

    >>> is_secret("HF_TOKEN"), is_secret("aws_secret_access_key"), is_secret("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    upper = name.upper()
    return any(word in upper for word in _SECRET) and not upper.startswith(_HARMLESS)


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        arguments: The program and its arguments. No shell reads them.
        where: The host on which it is started.
        environ: Variables that are set beside those that it inherits.
        typed: Names of variables whose values, one a line, are its standard input, where no process list shows them.
        times: How many such processes there are.
    """

    arguments: Sequence[str]
    where: str = "this host"
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    typed: Sequence[str] = ()
    times: int = 1


@dataclass(frozen=True)
class File:
    """A file that is written before the commands run."""

    path: str
    text: str


@dataclass(frozen=True)
class Plan:
    """All of it. ``str(plan)`` is for reading: values of secret variables are masked.

    Attributes:
        engine: Who starts the job.
        commands: What is run, in this order.
        files: What is written before.
        environ: The variables that ranks find, whichever way they travel.
        notes: What one should know besides.
        shown: The same plan of a job whose secrets are masked, for reading; itself if there is none.
    """

    engine: str
    commands: Sequence[Command] = field(repr=False)
    files: Sequence[File] = field(default=(), repr=False)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: Sequence[str] = ()
    shown: Plan | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """
        >>> print(Plan("local", [Command(["python", "a b.py"], times=2)], environ={"HF_TOKEN": "hf_12345"}))
        engine: local
        <BLANKLINE>
        variables of each rank:
          HF_TOKEN=***
        <BLANKLINE>
        on this host, 2 times:
          python 'a b.py'
        """
        return "\n".join((self.shown or self)._lines())

    def as_record(self) -> dict[str, Any]:
        """The same as JSON has it, without secrets, too.

        >>> Plan("local", [Command(["python", "a.py"])], environ={"HF_TOKEN": "hf_12345"}).as_record()["variables"]
        {'HF_TOKEN': '***'}
        """
        shown = self.shown or self
        commands = [
            {"on": each.where, "times": each.times, "arguments": list(each.arguments)}
            for each in shown.commands
        ]
        variables = {name: MASK if is_secret(name) else text for name, text in sorted(shown.environ.items())}
        return {
            "engine": self.engine,
            "commands": commands,
            "variables": variables,
            "notes": list(shown.notes),
        }

    def _lines(self) -> Iterator[str]:
        yield f"engine: {self.engine}"
        if self.environ:
            yield "\nvariables of each rank:"
            yield from (f"  {_assignment(name, value)}" for name, value in sorted(self.environ.items()))
        for file in self.files:
            yield f"\nfile {shlex.quote(file.path)}:"
            yield from (f"  {line}".rstrip() for line in file.text.splitlines())
        for command in self.commands:
            yield f"\non {command.where}{f', {command.times} times' if command.times > 1 else ''}:"
            own = [_assignment(name, value) for name, value in sorted(command.environ.items())]
            yield f"  {' '.join([*own, shlex.join(command.arguments)])}"
            if command.typed:
                yield f"  (its standard input: {', '.join(command.typed)})"
        if self.notes:
            yield ""
            yield from (f"note: {note}" for note in self.notes)


def secret_arguments(arguments: Sequence[str]) -> dict[int, tuple[str, str]]:
    """The arguments that hold a secret: by their places the names of their options or variables, and the secrets.

    >>> secret_arguments(["--api-key=abc", "--hf_token", "def", "--max-tokens", "7", "-x", "WANDB_API_KEY=ghi"])
    {0: ('--api-key', 'abc'), 2: ('--hf_token', 'def'), 6: ('WANDB_API_KEY', 'ghi')}
    """
    found = {}
    for place, (before, text) in enumerate(itertools.pairwise(["", *arguments])):
        name, equals, value = text.partition("=")
        if equals and value and name.upper().endswith(_SECRET):
            found[place] = name, value
        elif before.startswith("-") and before.upper().endswith(_SECRET) and text and text[0] != "-":
            found[place] = before, text
    return found


def masked_arguments(arguments: Sequence[str], secrets: Iterable[str]) -> list[str]:
    """The arguments for reading: without those that hold a secret, and without these secrets."""
    secret_at, secrets = secret_arguments(arguments), [*secrets]
    return [
        text.removesuffix(secret_at[place][1]) + MASK if place in secret_at else masked(text, secrets)
        for place, text in enumerate(arguments)
    ]


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, as they are and as JSON has them.

    >>> masked("--api-key=abcd-efgh", ["abcd", "abcd-efgh"])
    '--api-key=***'
    """
    known = {
        form for value in secrets if len(value) >= _SHORTEST for form in (value, json.dumps(value)[1:-1])
    }
    for form in sorted(known, key=len, reverse=True):
        text = text.replace(form, MASK)
    return text


def _assignment(name: str, value: str) -> str:
    return f"{name}={MASK if is_secret(name) else shlex.quote(value)}"
