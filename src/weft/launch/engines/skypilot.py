"""SkyPilot: a task, which is JSON and so YAML too, and ``sky launch``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.launch.discovery import port_of_job
from weft.launch.engines import torchrun
from weft.launch.engines.described import PYTHON, Described
from weft.launch.engines.plan import Command, File, Plan, is_secret

_PLACED = (
    '--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" '
    '--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={port}'
)


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """The task as a file, and ``sky launch``, which takes secrets from its own environment."""
    path = f"{job.name}-task.yaml"
    secret = {name: value for name, value in environ.items() if is_secret(name)}
    named = [part for name in sorted(secret) for part in ("--secret", name)]
    notes = ["SkyPilot chooses the hosts: names of hosts are not used"] if job.host_names else []
    notes.append(f"the cluster stays after the job, and costs: sky down {job.name} ends it")
    line = ["sky", "launch", "--yes", f"--cluster={job.name}", *named, path]
    text = json.dumps(task(job, environ), indent=2) + "\n"
    return Plan(job.engine, [Command(line, environ=secret)], [File(path, text)], environ, notes)


def task(job: Described, environ: Mapping[str, str]) -> dict[str, Any]:
    """The task. Its ``run`` is read by a shell on each host, so what comes from the job is quoted."""
    program, *rest = torchrun.command(replace(job, python=PYTHON), torchrun.marked(job))
    run = f"{program} {_PLACED.format(port=port_of_job(job.name))} {shlex.join(rest)}"
    content: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.host_count}
    if job.gpus_per_host:
        content["resources"] = {"accelerators": f"{job.gpu_kind}:{job.gpus_per_host}"}
    content["envs"] = {name: value for name, value in sorted(environ.items()) if not is_secret(name)}
    if names := sorted(name for name in environ if is_secret(name)):
        content["secrets"] = dict.fromkeys(names)
    return {**content, "run": run}
