"""An estimator as the original's launch notebooks have it, which starts the job here or plans it for another engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.compat import distribution as asked
from weft.compat.modelparallel.container import FOLDERS, container_environ, folders
from weft.errors import LaunchError
from weft.foreign import MOST_RANKS, listed, shown, shown_text
from weft.launch.engines.plan import Plan
from weft.launch.job import Job

DEFAULT_CHANNEL = "training"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class PyTorch:
    """A script to train with, and where.

    Args:
        entry_point: The script, in ``source_dir`` if that is given.
        instance_count: How many hosts. On the engine ``local`` all their ranks run on this machine.
        instance_type: What a host is; only ``local`` and the like mean anything here, others are for the reader.
        distribution: The original's ``distribution``, see :mod:`weft.compat.distribution`.
        hyperparameters: Arguments of the script, ``--name value``, and ``SM_HP_NAME`` in its environment.
        engine: Who starts the job: ``local``, or another one, whose plan :meth:`fit` prints.
        hosts: The names of the hosts, for engines that need them.
        source_dir: The folder of the script, in which it runs.
        environment: Variables of the ranks.
        image_uri: The image of containers, for Kubernetes.
        base_job_name: The job's name.
        ignored: All other arguments of the original's estimators; a warning names them.

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
        self._told = asked.read(self._given)
        self._environment = dict(environment or {})
        ranks = self._told.processes_per_host or 1
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
            mpi_options=self._told.mpi_options if engine == "mpirun" else (),
        )

    def plan(self, inputs: str | Mapping[str, str] | None = None) -> Plan:
        """What would run where."""
        return replace(self._job, variables=self._variables(inputs)).plan()

    def fit(self, inputs: str | Mapping[str, str] | None = None, wait: bool = True, **ignored: Any) -> None:
        """Runs the job to its end, on this machine; the plan of another engine is printed.

        Args:
            inputs: The folder of the data, or one for each channel; scripts find them in ``SM_CHANNEL_NAME``.
            wait: Only True: the job ends before this returns.
            ignored: What else the original's estimators take, such as ``logs`` and ``job_name``.

        Raises:
            LaunchError: The script or a folder is not there, or the job failed.
        """
        if not wait:
            raise LaunchError("wait=False is not supported: the job ends with this process")
        if self._job.engine != "local":
            print(self.plan(inputs))
            return
        for name, path in channels(inputs).items():
            if not Path(path).exists():
                raise LaunchError(f'the channel {shown_text(name)} is "{path}", which is not there')
        if not Path(self.source_dir, self.entry_point).is_file():
            raise LaunchError(f'there is no script "{Path(self.source_dir, self.entry_point)}"')
        variables = self._variables(inputs)
        results = {name: variables[name] for name in FOLDERS if name in variables}
        with folders(results):
            code = subprocess.run(
                self._command(), cwd=self.source_dir, env={**os.environ, **variables}, check=False
            ).returncode
        if code:
            raise LaunchError(
                f"the job of {shown_text(self.entry_point)} ended with exit code {code}; its output says why"
            )

    def _command(self) -> list[str]:
        original = ["--smdistributed"] if "smdistributed" in self._given else []
        line = [sys.executable, "-m", "weft", "run", "-n", str(self._job.ranks), *original]
        return [*line, "--", self.entry_point, *self._job.arguments]

    def _variables(self, inputs: str | Mapping[str, str] | None) -> dict[str, str]:
        found = {
            **hyperparameter_variables(self.hyperparameters),
            **self._told.settings(),
            **self._told.hand_over(os.environ),
            **channel_variables(inputs),
        }
        if self._job.engine == "local":
            known = {**os.environ, **found}
            found |= container_environ(known, self._job.ranks, self._job.arguments)
            made = {name: os.path.join(self.source_dir, folder) for name, folder in FOLDERS.items()}
            found |= {name: path for name, path in made.items() if name not in os.environ}
        return {**found, **self._environment}


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
