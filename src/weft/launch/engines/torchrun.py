"""PyTorch's ``torchrun``, once on each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.launch.discovery import port_of_job
from weft.launch.engines.described import PYTHON, Described
from weft.launch.engines.local import rank_program
from weft.launch.engines.plan import Command, Plan


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """``torchrun`` on each host; the first host has rank 0, and a port there follows from the job's name."""
    if job.host_count == 1:
        places = [(job.host_names[0] if job.host_names else "this host", ["--standalone"])]
    else:
        places = [(host, placed(job, str(number))) for number, host in enumerate(job.host_names)]
    # with a folder ranks of this host leave there how they failed
    program = rank_program(job)[1:] if job.log_dir and job.host_count == 1 else job.program
    commands = [Command(command(job, options, program), host, environ) for host, options in places]
    notes = ["each command is to be run on its host"] if len(commands) > 1 else []
    return Plan(job.engine, commands, environ=environ, notes=notes)


def placed(job: Described, node: str, address: str = "") -> list[str]:
    """The options for one of several hosts: its number, and the address of the first one."""
    leader = address or job.host_names[0].rpartition("@")[2]
    return [
        f"--nnodes={job.host_count}", f"--node-rank={node}", f"--master-addr={leader}",
        f"--master-port={port_of_job(job.name)}",
    ]  # fmt: skip


def marked(job: Described) -> list[str]:
    """The option that marks the lines of each rank, for engines that keep one log for all ranks of a host."""
    return ["--tee=3"] if job.ranks_per_host > 1 and not job.log_dir else []


def command(job: Described, options: list[str], ranks: Sequence[str] | None = None) -> list[str]:
    """``torchrun`` with all its arguments. ``ranks``: what they run, if that is not the script as it is.

    >>> from weft.launch.engines.described import Described
    >>> command(Described("train.py", ranks_per_host=2), ["--standalone"])
    ['torchrun', '--standalone', '--nproc-per-node=2', 'train.py']
    """
    restarts = [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    logs = [f"--log-dir={job.log_dir}", "--tee=3"] if job.log_dir else []
    launcher = ["torchrun"] if job.python == PYTHON else [job.python, "-m", "torch.distributed.run"]
    program = job.program if ranks is None else ranks
    return [*launcher, *options, f"--nproc-per-node={job.ranks_per_host}", *restarts, *logs, *program]
