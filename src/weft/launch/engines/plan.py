"""What would run where: the commands, environments and files that an engine makes of a job, printed without secrets."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MASK = "***"
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL")
_HARMLESS = ("TOKENIZER", "KEYBOARD")
_SHORTEST = 4
"""Shorter values are masked where their variable stands, and not all over the text."""


def is_secret(name: str) -> bool:
    """Whether the name of a variable says that its value is nobody's business.

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
        hidden: Further texts that are masked.
    """

    engine: str
    commands: Sequence[Command]
    files: Sequence[File] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: Sequence[str] = ()
    hidden: Sequence[str] = field(default=(), repr=False)

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
        variables = (value for name, value in self.environ.items() if is_secret(name))
        return _masked("\n".join(self._lines()), [*variables, *self.hidden])

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


def secret_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """The options among the arguments of a script that hold a secret, by their names, with the secrets.

    >>> secret_arguments(["--api-key=abc", "--hf_token", "abc", "--max-tokens", "7"])
    {'--api-key': 'abc', '--hf_token': 'abc'}
    """
    found = {}
    for text, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = text.partition("=")
        if name.startswith("-") and name.upper().endswith(_SECRET):
            found[name] = value if equals else following
    return found


def _assignment(name: str, value: str) -> str:
    return f"{name}={MASK if is_secret(name) else shlex.quote(value)}"


def _masked(text: str, secrets: Iterable[str]) -> str:
    values = {value for value in secrets if len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        for form in (value, shlex.quote(value), json.dumps(value)[1:-1]):
            text = text.replace(form, MASK)
    return text
