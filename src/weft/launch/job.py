"""A job that any engine can start, as one value."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.config import with_those_of
from weft.errors import LaunchError
from weft.launch.discovery import TOKEN
from weft.launch.engines import kubernetes, local, mpirun, ray, skypilot, slurm, ssh, torchrun
from weft.launch.engines.described import Described
from weft.launch.engines.plan import MASK, Plan, is_secret, masked, masked_arguments, secret_arguments
from weft.launch.environ import RANK_DEFAULTS
from weft.launch.started.handle import Handle
from weft.launch.started.start import start
from weft.untrusted import listed

_PLANS: dict[str, Callable[[Described, Mapping[str, str]], Plan]] = {
    "local": local.plan,
    "ssh": ssh.plan,
    "torchrun": torchrun.plan,
    "mpirun": mpirun.plan,
    "slurm": slurm.plan,
    "ray": ray.plan,
    "kubernetes": kubernetes.plan,
    "skypilot": skypilot.plan,
}
_OWN_TOKEN = ("local", "slurm", "ray")
"""Engines whose jobs make a secret themselves, or need none."""

_IN_CONTAINERS = ("kubernetes", "skypilot")
"""Engines that have no `weft run` where the ranks are started."""

_TYPED = ("kubernetes",)
"""Engines that read secrets line by line from the standard input."""

_MADE = f"{TOKEN} was made for this plan: to start by hand, set one of your own, the same on all hosts"
_REMEDY = "hand a variable on instead"


@dataclass(frozen=True, kw_only=True)
class Job(Described):
    """A job, wherever it runs.

    Attributes:
        script: The script, or the name of a module.
        arguments: What it is given.
        module: Whether ``script`` is the name of a module.
        hosts: How many hosts, or their names; the first one has rank 0.
        ranks_per_host: How many ranks each of them has.
        settings: Settings of weft, which win over those of the script.
        variables: Variables of the ranks.
        hand_on: Names of further variables, whose values are those of this process when the plan is made.
        engine: Who starts the ranks: ``local``, ``ssh``, ``torchrun``, ``mpirun``, ``slurm``, ``ray``, ``kubernetes``
            or ``skypilot``.
        form: The engine's form: ``openmpi4``, ``openmpi5`` or ``mpich``; ``trainjob`` or ``jobset``.
        name: The job's name: small letters, digits, hyphens. By default it is made of the script's.
        time_limit: After which the engine ends it; for Slurm and Kubernetes.
        max_restarts: How often the engine starts it again, if it does so.
        log_dir: The job's folder, see ``docs/jobs.md``; where other engines than ``local`` and ``ssh`` write logs.
        folder: Where the job runs, on each host.
        python: Python's command on the hosts.
        image: The image of containers, for Kubernetes.
        gpus_per_host: How many GPUs a host has for the job, for engines that ask.
        gpu_kind: What SkyPilot calls them, ``A100`` for example.
        mpi_options: Further arguments of ``mpirun``.
        ssh_options: Further arguments of ``ssh``, such as ``["-F", "config"]``; they win over weft's own.
        min_hosts: With how many hosts the engine ``ssh`` starts it again when others are gone; 0: only with all.

    Raises:
        LaunchError: A value is wrong, or values do not go together; all faults are named.

    >>> job = Job("train.py", hosts=2, ranks_per_host=4, settings={"partitions": 4}, engine="slurm")
    >>> job.plan({}).commands[0].arguments
    ['sbatch', '--parsable', 'train.sbatch']
    """

    def plan(self, environ: Mapping[str, str] | None = None) -> Plan:
        """The commands that would run, and where.

        Args:
            environ: Where variables to hand on have their values; by default this process's environment.

        Raises:
            LaunchError: A variable to hand on is not set, or a secret has several lines and travels as one.
        """
        environ = os.environ if environ is None else environ
        missing = [name for name in self.hand_on if name not in environ]
        if missing:
            raise LaunchError(f"these variables are to be handed on and are not set: {listed(missing)}")
        found = {**{name: environ[name] for name in self.hand_on}, **self.variables}
        if self.settings:  # ranks on this host have its environment, too
            before = {**(environ if self.engine == "local" else {}), **found}
            found["WEFT_SET"] = json.dumps(with_those_of(before, self.settings))
        if self.host_count > 1 and self.engine not in _OWN_TOKEN:
            found.setdefault(TOKEN, environ.get(TOKEN) or secrets.token_hex(16))
        for name, value in found.items():
            if self.engine in _TYPED and is_secret(name) and "\n" in value:
                raise LaunchError(
                    f"{name} has several lines: the engine {self.engine} hands secrets on line by line"
                )
        secret_of = {
            **dict(secret_arguments(self.mpi_options).values()),
            **dict(secret_arguments(self.arguments).values()),
        }
        made = (
            [_MADE]
            if TOKEN in found and self.engine != "ssh" and TOKEN not in {*environ, *self.variables}
            else []
        )
        open_arguments = [f"{name} is an argument, which others can read: {_REMEDY}" for name in secret_of]
        found_plan = _PLANS[self.engine](self, found)
        found_plan = replace(found_plan, notes=[*found_plan.notes, *made, *open_arguments])
        secret = [value for name, value in found.items() if is_secret(name)]
        shown = self._masked(found, [*secret, *secret_of.values()])
        return replace(found_plan, shown=replace(shown, notes=found_plan.notes))

    def start(self, environ: Mapping[str, str] | None = None, *, shows_output: bool = True) -> Handle:
        """The job, running: wait for it, read its logs, stop it.

        It goes on if this process ends.

        Args:
            environ: What it is started with; by default this process's environment.
            shows_output: Whether what the ranks and the launcher write appears among this process's output.

        Raises:
            LaunchError: The engine is not installed, the script is not there, or a variable to hand on is not set.
        """
        environ = os.environ if environ is None else environ
        variables = self.variables
        if self.engine in _IN_CONTAINERS:
            variables = {**RANK_DEFAULTS, **variables}  # others get them from weft run
        job = replace(self, variables=variables)
        return start(job, job.plan(environ), environ, shows_output)

    def _masked(self, found: Mapping[str, str], secrets: Sequence[str]) -> Plan:
        """The plan for reading: that of the same job without its secrets, whatever an engine's quotes make of them."""
        environ = {name: MASK if is_secret(name) else masked(value, secrets) for name, value in found.items()}
        job = replace(
            self,
            arguments=masked_arguments(self.arguments, secrets),
            mpi_options=masked_arguments(self.mpi_options, secrets),
        )
        return _PLANS[self.engine](job, environ)
