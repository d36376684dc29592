"""Starts a job for Python: by `weft run`, or by what an engine has instead of a command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from weft.errors import LaunchError
from weft.launch.engines.described import Described
from weft.launch.engines.plan import Plan
from weft.launch.started.command import command
from weft.launch.started.handle import Handle, ProcessHandle, SlurmHandle
from weft.launch.started.kubernetes import KubernetesHandle
from weft.launch.started.sky import SkyHandle
from weft.untrusted import shown_path, shown_text


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
