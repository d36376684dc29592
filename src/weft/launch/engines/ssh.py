"""ssh to each host, where ``torchrun`` starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from weft.launch.engines import torchrun
from weft.launch.engines.described import Described
from weft.launch.engines.plan import Command, Plan, is_secret

STRICT = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
"""Nobody is asked, and a host whose key is not known is refused."""
_READ = 'cd -- "$1" || exit; shift; for name in {names}; do IFS= read -r "$name" && export "$name"; done; exec "$@"'
_PLAIN = 'cd -- "$1" || exit; shift; exec "$@"'


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """ssh for each host. Secrets are read from the standard input, so that no list of processes shows them."""
    hosts = job.host_names or ("localhost",)
    open_names = [f"{name}={value}" for name, value in sorted(environ.items()) if not is_secret(name)]
    typed = sorted(name for name in environ if is_secret(name))
    read = _READ.format(names=" ".join(typed)) if typed else _PLAIN
    commands = []
    for number, host in enumerate(hosts):
        options = torchrun.placed(job, str(number)) if len(hosts) > 1 else ["--standalone"]
        remote = ["sh", "-c", read, "sh", job.folder, "env", *open_names, *torchrun.command(job, options)]
        # sshd gives one text to the remote shell, so each argument is quoted for it
        commands.append(Command(["ssh", *STRICT, "--", host, shlex.join(remote)], typed=typed))
    return Plan(job.engine, commands, environ=environ)
