"""An estimator as the original's launch notebooks have it, which starts the job by any engine that can be started."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.compat import distribution as asked
from weft.compat.enable import launch_environ
from weft.compat.modelparallel.container import FOLDERS, container_environ, folders
from weft.errors import LaunchError
from weft.launch.engines.plan import Plan
from weft.launch.job import Job
from weft.launch.started.handle import Handle
from weft.untrusted import MOST_RANKS, listed, shown, shown_text

DEFAULT_CHANNEL = "training"
LOGS = ("All", "None", "Rules", "Training")
"""What the original takes for ``logs``, beside True and False; "None" and "Rules" show no output of the script."""
_HERE = ("local", "torchrun", "mpirun")
"""Engines whose ranks are on this machine if no other host is named."""
_ELSEWHERE = ("kubernetes", "skypilot")
"""Engines whose hosts have other folders."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class PyTorch:
    """A script to train with, and where.

    Args:
        entry_point: The script, in ``source_dir`` if that is given.
        instance_count: How many hosts. On the engine ``local`` all their ranks run on this machine.
        instance_type: What a host is; only ``local`` and the like mean anything here, others are for the reader.
        distribution: The original's ``distribution``, see :mod:`weft.compat.distribution`.
        hyperparameters: Arguments of the script, ``--name value``, and ``SM_HP_NAME`` in its environment.
        engine: Who starts the job: ``local``, or another one, see ``docs/several-hosts.md``.
        hosts: The names of the hosts, for engines that need them.
        source_dir: The folder of the script, in which it runs.
        environment: Variables of the ranks.
        image_uri: The image of containers, for Kubernetes.
        base_job_name: The job's name.
        log_dir: The job's folder, see ``docs/jobs.md``: with it errors say which rank failed, and why.
        ignored: All other arguments of the original's estimators; a warning names them.

    Attributes:
        latest_training_job: The job that :meth:`fit` started last: ``wait()``, ``stop()``, ``logs(rank)``, ``poll()``.

    Raises:
        LaunchError: A value is wrong.
        ConfigError: The distribution is.

    >>> estimator = PyTorch("train.py", instance_count=2, engine="slurm", hyperparameters={"lr": 0.1, "epochs": 2})
    >>> estimator.plan().files[0].text.splitlines()[-1].rpartition("train.py ")[2]
    '--epochs 2 --lr 0.1'
    """

    def __init__(
        self,
        entry_point: str,
        *,
        instance_count: int = 1,
        instance_type: str = "local",
        distribution: Mapping[str, Any] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        engine: str = "local",
        hosts: Sequence[str] | None = None,
        source_dir: str | None = None,
        environment: Mapping[str, str] | None = None,
        image_uri: str | None = None,
        base_job_name: str | None = None,
        log_dir: str = "",
        **ignored: Any,
    ) -> None:
        if type(instance_count) is not int or not 1 <= instance_count <= MOST_RANKS:
            raise LaunchError(
                f"instance_count is {shown(instance_count)}: write a whole number of at least 1"
            )
        if hosts is not None and len(hosts) != instance_count:
            raise LaunchError(f"hosts names {len(hosts)} hosts, and instance_count is {instance_count}")
        if ignored:
            warnings.warn(f"these arguments mean nothing here: {listed(sorted(ignored))}", stacklevel=2)
        self.entry_point = entry_point
        self.instance_type = instance_type
        self.source_dir = os.path.abspath(source_dir or ".")
        self.hyperparameters = dict(hyperparameters or {})
        self._given = distribution or {}
        self._distribution = asked.read(self._given)
        self._environment = dict(environment or {})
        self.latest_training_job: Handle | None = None
        ranks = self._distribution.processes_per_host or 1
        local = engine == "local"
        self._job = Job(
            entry_point,
            arguments(self.hyperparameters),
            hosts=1 if local else hosts or instance_count,
            ranks_per_host=ranks * instance_count if local else ranks,
            engine=engine,
            name=base_job_name or "",
            folder=self.source_dir,
            python=sys.executable,
            image=image_uri or "",
            log_dir=log_dir,
            mpi_options=self._distribution.mpi_options if engine == "mpirun" else (),
        )

    def plan(self, inputs: str | Mapping[str, str] | None = None) -> Plan:
        """The commands that would run, and where."""
        return replace(self._job, variables=self._variables(inputs)).plan()

    def fit(
        self,
        inputs: str | Mapping[str, str] | None = None,
        wait: bool = True,
        logs: bool | str | Sequence[str] = "All",
        job_name: str | None = None,
        **ignored: Any,
    ) -> None:
        """Runs the job to its end; with ``wait=False`` it only starts it, and :attr:`latest_training_job` has it.

        Args:
            inputs: The folder of the data, or one for each channel; scripts find them in ``SM_CHANNEL_NAME``.
            wait: Whether to wait for the job's end. A job that nobody waits for goes on if this Python ends.
            logs: Whether the script's output is shown: True or False, or the original's ``"All"``, ``"Training"``,
                ``"Rules"``, ``"None"`` or a list of these. Slurm writes it to a file of its own in any case.
            job_name: This start's name, instead of ``base_job_name``.
            ignored: What else the original's estimators take; it means nothing here.

        Raises:
            LaunchError: The script or a folder is not there, a value is wrong, or the engine is not installed.
            JobError: The job failed; the error names the rank to blame where that is known, as with ``log_dir``.
        """
        if type(wait) is not bool:
            raise LaunchError(f"wait is {shown(wait)}: write True or False")
        shows = shows_output(logs)
        job = replace(self._job, name=job_name or self._job.name)
        for name, path in channels(inputs).items():
            if self._here and not Path(path).exists():
                raise LaunchError(f'the channel {shown_text(name)} is "{path}", which is not there')
        job = replace(job, variables=self._variables(inputs))
        results = {name: job.variables[name] for name in FOLDERS if name in job.variables}
        # folders that stay empty go with a job that is waited for; another one may need them for longer
        made = folders(results) if wait else nullcontext()
        for place in () if wait else results.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        with made:
            self.latest_training_job = job.start(os.environ, shows_output=shows)
            if wait:
                self._wait(self.latest_training_job)

    def _wait(self, handle: Handle) -> None:
        try:
            handle.wait()
        except KeyboardInterrupt:
            handle.stop()
            raise

    @property
    def _here(self) -> bool:
        """True if all ranks are on this machine."""
        return self._job.engine in _HERE and self._job.hosts == 1

    def _variables(self, inputs: str | Mapping[str, str] | None) -> dict[str, str]:
        found = {
            **hyperparameter_variables(self.hyperparameters),
            **self._distribution.settings(),
            **self._distribution.hand_over(os.environ),
            **channel_variables(inputs),
        }
        if "smdistributed" in self._given:
            found |= launch_environ({**os.environ, **found}, self._job.arguments, self._job.ranks)
        if self._job.engine not in _ELSEWHERE:
            made = {name: os.path.join(self.source_dir, folder) for name, folder in FOLDERS.items()}
            made |= {"SM_NUM_GPUS": str(self._job.ranks_per_host)}
            made |= {"SM_USER_ARGS": json.dumps(list(self._job.arguments))}
            found |= {name: text for name, text in made.items() if name not in os.environ}
        if self._here:
            found |= container_environ({**os.environ, **found}, self._job.ranks, self._job.arguments)
        return {**found, **self._environment}


def shows_output(logs: object) -> bool:
    """True if the script's output is shown, by what the original takes for ``logs``.

    >>> shows_output(True), shows_output("None"), shows_output(["Rules", "Training"])
    (True, False, True)
    """
    if isinstance(logs, bool):
        return logs
    names = [logs] if isinstance(logs, str) else logs
    if not isinstance(names, Sequence) or not names or not all(name in LOGS for name in names):
        raise LaunchError(f"logs is {shown(logs)}: write True, False, or some of {', '.join(LOGS)}")
    return "All" in names or "Training" in names


def arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Hyperparameters as arguments of a script, sorted; ``mp_parameters`` travel as a variable only.

    >>> arguments({"lr": 0.1, "b": True, "mp_parameters": {"partitions": 2}, "note": "a b"})
    ['-b', 'True', '--lr', '0.1', '--note', 'a b']
    """
    found = []
    for name, value in sorted(_named(hyperparameters).items()):
        if name != "mp_parameters":
            found += [f"-{name}" if len(name) == 1 else f"--{name}", _text(value)]
    return found


def _text(value: Any) -> str:
    return (
        ",".join(f"{key}={value[key]}" for key in sorted(value)) if isinstance(value, Mapping) else str(value)
    )


def hyperparameter_variables(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """``SM_HPS``, and ``SM_HP_NAME`` for each hyperparameter: texts as they are, all else as JSON.

    >>> hyperparameter_variables({"lr": 0.1, "mode": "fast"})
    {'SM_HPS': '{"lr": 0.1, "mode": "fast"}', 'SM_HP_LR': '0.1', 'SM_HP_MODE': 'fast'}
    """
    named = _named(hyperparameters)
    found = {"SM_HPS": _json(named)}
    for name, value in named.items():
        variable = f"SM_HP_{re.sub('[.-]', '_', name).upper()}"
        found[variable] = value if isinstance(value, str) else _json(value)
    return found


def channels(inputs: str | Mapping[str, str] | None) -> dict[str, str]:
    """The folder of each channel.

    >>> channels("file:///data")
    {'training': '/data'}
    """
    given = {DEFAULT_CHANNEL: inputs} if isinstance(inputs, str) else dict(inputs or {})
    found = {}
    for name, place in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise LaunchError(f"{shown(name)} is no name of a channel: write letters, digits and hyphens")
        path = str(place).removeprefix("file://")
        if "://" in path:
            raise LaunchError(
                f"the channel {name} is {shown_text(path)}: copy it to a folder, and give its path"
            )
        found[name] = os.path.abspath(path)
    return found


def channel_variables(inputs: str | Mapping[str, str] | None) -> dict[str, str]:
    """``SM_CHANNELS``, and ``SM_CHANNEL_NAME`` for each channel."""
    found = channels(inputs)
    variables = {f"SM_CHANNEL_{re.sub('[.-]', '_', name).upper()}": path for name, path in found.items()}
    return {"SM_CHANNELS": json.dumps(sorted(found)), **variables} if found else {}


def _named(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    for name in hyperparameters:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise LaunchError(
                f"{shown(name)} is no name of a hyperparameter: write letters, digits and hyphens"
            )
    return dict(hyperparameters)


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise LaunchError(
            f"a hyperparameter is {shown(value)}: give texts, numbers, lists and dicts"
        ) from None
