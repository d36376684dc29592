"""Starts a job for Python: by the command line of `weft run`, or by what an engine has instead of a command."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from weft.errors import LaunchError
from weft.launch.engines.described import FORMS, PYTHON, Described
from weft.launch.engines.plan import Plan
from weft.launch.started.handle import Handle, ProcessHandle, SlurmHandle
from weft.launch.started.kubernetes import KubernetesHandle
from weft.launch.started.sky import SkyHandle
from weft.untrusted import shown_path, shown_text


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


def start(job: Described, plan: Plan, environ: Mapping[str, str], shows_output: bool = True) -> Handle:
    """The job, running. ``environ`` has the variables that are handed on.

    ``shows_output``: whether what ranks and launcher write appears among this process's output.

    Raises:
        LaunchError: What the engine needs is not there.
    """
    if job.engine == "kubernetes":
        return KubernetesHandle(job, plan, environ)
    if not job.module and not Path(job.folder, job.script).is_file():
        raise LaunchError(f'there is no script "{shown_path(Path(job.folder, job.script))}"')
    if job.engine == "skypilot":
        return SkyHandle(job, plan, environ)
    line = command(job, sys.executable)
    if shutil.which(line[0]) is None:
        raise LaunchError(f'there is no command "{shown_text(line[0])}", which is the job\'s Python')
    given = {**environ, **job.variables}
    if job.engine == "slurm":
        return SlurmHandle(job, line, given)
    shown = None if shows_output else subprocess.DEVNULL
    return ProcessHandle(
        job,
        subprocess.Popen(
            line, cwd=job.folder, env=given, stdin=subprocess.DEVNULL, stdout=shown, stderr=shown
        ),
    )
