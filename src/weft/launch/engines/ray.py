"""Ray Train: a small program that runs the script on the workers of a ``TorchTrainer``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from weft.launch.engines.described import Described
from weft.launch.engines.plan import Command, File, Plan, is_secret

_DRIVER = '''\
"""Runs a job of weft on the workers of Ray Train."""

import json
import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

JOB = json.loads({text!r})


def run(job):
    sys.argv = [job["script"], *job["arguments"]]
    if job["module"]:
        runpy.run_module(job["script"], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(job["script"])))
        runpy.run_path(job["script"], run_name="__main__")


if __name__ == "__main__":
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # workers stay in the copy of this folder, where the script is
    handed = {{name: os.environ[name] for name in JOB["handed_on"]}}
    ray.init(runtime_env={{"env_vars": {{**JOB["variables"], **handed}}, "working_dir": "."}})
    TorchTrainer(
        run,
        train_loop_config=JOB,
        scaling_config=ScalingConfig(num_workers=JOB["ranks"], use_gpu=JOB["use_gpu"]),
        run_config=RunConfig(name=JOB["name"], failure_config=FailureConfig(max_failures=JOB["max_failures"])),
    ).fit()
'''


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """The program as a file, and Python that runs it. What the program is to do stands in it as one JSON text."""
    path = f"{job.name}-ray.py"
    secret = {name: value for name, value in environ.items() if is_secret(name)}
    notes = ["Ray chooses the hosts: names of hosts are not used"] if job.host_names else []
    return Plan(
        job.engine,
        [Command([job.python, path], environ=secret)],
        [File(path, driver(job, environ))],
        environ,
        notes,
    )


def driver(job: Described, environ: Mapping[str, str]) -> str:
    """The text of the program. Secrets are not in it: it takes them from its own environment."""
    content = {
        "name": job.name,
        "script": job.script,
        "arguments": list(job.arguments),
        "module": job.module,
        "ranks": job.ranks,
        "use_gpu": job.gpus_per_host > 0,
        "max_failures": job.max_restarts,
        "variables": {name: value for name, value in sorted(environ.items()) if not is_secret(name)},
        "handed_on": sorted(name for name in environ if is_secret(name)),
    }
    return _DRIVER.format(text=json.dumps(content))
