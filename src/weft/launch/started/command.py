"""A job as the command line of `weft run`, which starts it. Pure."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta

from weft.launch.engines.described import FORMS, PYTHON, Described


def command(job: Described, python: str) -> list[str]:
    """The program and its arguments. Variables are only named there: their values stand in its environment.

    Args:
        job: What is to run.
        python: Python's command, unless the job has one of its own.

    >>> command(Described("train.py", ranks_per_host=2, settings={"partitions": 2}), "python")[4:]
    ['--engine', 'local', '--ranks-per-host', '2', '--set', 'partitions=2', '--', 'train.py']
    """
    line = [python if job.python == PYTHON else job.python, "-m", "weft", "run", "--engine", job.engine]
    options = {
        "--hosts": ",".join(job.host_names) or (str(job.host_count) if job.host_count > 1 else ""),
        "--ranks-per-host": str(job.ranks_per_host),
        "--form": "" if job.form == FORMS[job.engine][0] else job.form,
        "--name": "" if job.engine == "local" else job.name,
        "--time": "" if job.time_limit is None else f"{-(-job.time_limit // timedelta(seconds=1))}s",
        "--max-restarts": str(job.max_restarts or ""),
        "--min-hosts": str(job.min_hosts or ""),
        "--log-dir": job.log_dir,
        "--gpus-per-host": str(job.gpus_per_host or ""),
        "--gpu-kind": job.gpu_kind,
        "--image": job.image,
    }
    line += [part for name, value in options.items() if value for part in (name, value)]
    if job.mpi_options:
        line.append(f"--mpi-options={shlex.join(job.mpi_options)}")
    if job.ssh_options:
        line.append(f"--ssh-options={shlex.join(job.ssh_options)}")
    for name, value in job.settings.items():
        line += ["--set", f"{name}={json.dumps(value)}"]
    for name in dict.fromkeys([*job.hand_on, *job.variables]):
        line += ["-x", name]
    return [*line, *(["-m"] if job.module else []), "--", job.script, *job.arguments]
