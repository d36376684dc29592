"""Slurm: a batch script, and ``sbatch`` that hands it in."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import timedelta

from weft.launch.discovery import TOKEN
from weft.launch.engines.described import Described
from weft.launch.engines.local import rank_program
from weft.launch.engines.plan import Command, File, Plan, is_secret
from weft.launch.environ import ATTEMPT
from weft.watch.statement import FOLDER

INHERITED = ("HOME", "LANG", "PATH", "USER")
"""Variables of the one who hands the job in that every job has."""
_MAKES_TOKEN = "export {name}=\"${{{name}:-$({python} -c 'import secrets; print(secrets.token_hex(16))')}}\""

_WARNING_S = 120
_AGAIN = """\
export {attempt}="${{SLURM_RESTART_COUNT:-0}}"
[ "${attempt}" -le {most} ] || exit 1
{begin}{srun}
code=$?
if [ $code -ne 0 ] && [ $code -ne 2 ] && [ "${attempt}" -lt {most} ]; then
{again}    echo "weft: exit code $code: back into the queue, restart $((${attempt} + 1)) of {most}" >&2
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script
fi
{end}exit $code"""
"""Starts the job again after a failure, as ``weft run`` on one machine does, and after a save (75)."""

_LOGS = f'--output="${{{FOLDER}//%/%%}}/rank-%t.log"'
"""Each rank's output and errors in a file of its own."""


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """A batch script beside the logs. Secrets are not in it: Slurm hands them on from the environment of ``sbatch``."""
    path = f"{job.log_dir}/{job.name}.sbatch" if job.log_dir else f"{job.name}.sbatch"
    secret = {name: value for name, value in environ.items() if is_secret(name)}
    return Plan(
        job.engine,
        [Command(["sbatch", "--parsable", path], environ=secret)],
        [File(path, script(job, environ))],
        environ,
    )


def script(job: Described, environ: Mapping[str, str]) -> str:
    """The text of the batch script, which can be handed in by hand too."""
    return "\n".join(["#!/bin/bash", *_directives(job, environ), *_body(job, environ)]) + "\n"


def _directives(job: Described, environ: Mapping[str, str]) -> Iterator[str]:
    secrets = sorted(name for name in environ if is_secret(name))
    options = {
        "job-name": job.name,
        "nodes": str(job.host_count),
        "ntasks-per-node": str(job.ranks_per_host),
        "export": ",".join([*INHERITED, *secrets]),
        "open-mode": "append",
    }
    if job.host_names:
        options["nodelist"] = ",".join(job.host_names)
    if job.gpus_per_host:
        options["gpus-per-node"] = str(job.gpus_per_host)
    if job.time_limit is not None:
        options["time"] = clock(job.time_limit)
    if job.log_dir:
        options["output"] = f"{job.log_dir.replace('%', '%%')}/slurm-%j.log"
    yield from (f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items())
    yield f"#SBATCH --{'requeue' if job.max_restarts else 'no-requeue'}"
    if job.max_restarts and job.time_limit is not None:
        yield f"#SBATCH --signal=USR1@{_warning_s(job.time_limit)}"


def _body(job: Described, environ: Mapping[str, str]) -> Iterator[str]:
    python = shlex.quote(job.python)
    for name, value in sorted(environ.items()):
        if not is_secret(name):
            yield f"export {name}={shlex.quote(value)}"
    if job.host_count > 1:
        yield _MAKES_TOKEN.format(name=TOKEN, python=python)
    program = rank_program(job) if job.log_dir else [job.python, *job.program]
    options = ["srun", "--kill-on-bad-exit=1", "--wait=60", "--export=ALL"]
    srun = " ".join([shlex.join(options), *([_LOGS] if job.log_dir else []), shlex.join(program)])
    journal = {"begin": "", "again": "", "end": ""}
    if job.log_dir:
        batch = f"{python} -m weft.launch.journal.batch"
        where = f"{shlex.quote(job.log_dir)} {job.ranks}"
        attempt = f'"${{{ATTEMPT}:-0}}"'
        journal = {
            "begin": f'{FOLDER}="$({batch} begin {where} {attempt})" || exit 1\nexport {FOLDER}\n',
            "again": f"    {batch} again {where} $code\n",
            "end": f"{batch} end {where} $code\n",
        }
    if job.max_restarts:
        yield _AGAIN.format(attempt=ATTEMPT, srun=srun, most=job.max_restarts, **journal)
    elif job.log_dir:
        yield f"{journal['begin']}{srun}\ncode=$?\n{journal['end']}exit $code"
    else:
        yield f"exec {srun}"


def _warning_s(limit: timedelta) -> int:
    """The seconds before the time limit at which ranks are asked to save and end.

    >>> _warning_s(timedelta(hours=2)), _warning_s(timedelta(minutes=2))
    (120, 60)
    """
    return min(_WARNING_S, int(limit.total_seconds() / 2))


def clock(span: timedelta) -> str:
    """A time as Slurm writes it, in whole minutes, rounded up.

    >>> clock(timedelta(hours=2)), clock(timedelta(days=1, minutes=90))
    ('0-02:00:00', '1-01:30:00')
    """
    minutes = -(-span // timedelta(minutes=1))
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
