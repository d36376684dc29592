"""ssh to each host, where weft's agent starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from weft.errors import LaunchError
from weft.launch.engines.described import Described
from weft.launch.engines.local import rank_program
from weft.launch.engines.plan import Command, Plan
from weft.launch.remote.agent import FILE
from weft.untrusted import shown_text

STRICT = (
    "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=20",
    "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
"""Nobody is asked, a host whose key is not known is refused, and one that is cut off is noticed."""
OPTIONS = "WEFT_SSH_OPTIONS"
"""The variable with options of ssh that are not given otherwise."""
_PATH = "PYTHONPATH"
"""The agent's Python needs it before the first message."""
_REMOTE = 'cd -- "$1" || exit; shift; exec "$@"'


def read_options(given: str | None, environ: Mapping[str, str]) -> list[str]:
    """Arguments of ssh, as one would type them; those of the variable if none are given.

    >>> read_options(None, {"WEFT_SSH_OPTIONS": "-F 'my config'"})
    ['-F', 'my config']
    """
    text, name = (environ.get(OPTIONS, ""), OPTIONS) if given is None else (given, "--ssh-options")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{name} cannot be read: {error}: {shown_text(text)}") from None


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """An ssh for each host, which starts weft's agent, and what the agents start.

    What ranks run and find is said on the standard input of ssh: no list of processes on this host shows it.
    """
    path = ["env", f"{_PATH}={environ[_PATH]}"] if _PATH in environ else []
    # sshd gives one text to the remote shell, so each argument is quoted for it
    remote = shlex.join(["sh", "-c", _REMOTE, "sh", job.folder, *path, job.python, FILE])
    hosts = job.host_names or ("localhost",)
    agents = [
        Command(["ssh", *job.ssh_options, *STRICT, "--", host, remote], typed=sorted(environ))
        for host in hosts
    ]
    ranks = [Command(rank_program(job), host, times=job.ranks_per_host) for host in hosts]
    again = f"started again after a failure, up to {job.max_restarts} times"
    return Plan(job.engine, [*agents, *ranks], environ=environ, notes=[again] if job.max_restarts else [])
