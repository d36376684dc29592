"""Kubernetes: a ``TrainJob`` of Kubeflow Trainer v2, or a plain ``JobSet``. Manifests are JSON, which is YAML too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.launch.engines import torchrun
from weft.launch.engines.described import Described
from weft.launch.engines.plan import Command, File, Plan, is_secret

Manifest = dict[str, Any]
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """The manifest as a file, and ``kubectl`` that creates it. Secrets are made before, from the standard input."""
    path = f"{job.name}.json"
    manifest = trainjob(job, environ) if job.form == "trainjob" else jobset(job, environ)
    typed = sorted(name for name in environ if is_secret(name))
    create = ["kubectl", "create", "secret", "generic", secret_name(job), "--from-env-file=/dev/stdin"]
    commands = [Command(["kubectl", "create", f"--filename={path}"])]
    notes = ["Kubernetes chooses the hosts: names of hosts are not used"] if job.host_names else []
    if typed:
        commands.insert(0, Command(create, typed=typed))
        notes.append(f"{secret_name(job)}: the standard input has a line NAME=VALUE for each variable")
    return Plan(job.engine, commands, [File(path, json.dumps(manifest, indent=2) + "\n")], environ, notes)


def trainjob(job: Described, environ: Mapping[str, str]) -> Manifest:
    """A ``TrainJob``: the runtime ``torch-distributed`` gives torchrun its place."""
    trainer = {
        "image": job.image,
        "numNodes": job.host_count,
        "command": [*map(_literal, torchrun.command(job, torchrun.marked(job)))],
        "env": _variables(job, environ),
        **_resources(job, "resourcesPerNode"),
    }
    spec: Manifest = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if job.time_limit is not None:
        spec["activeDeadlineSeconds"] = int(job.time_limit.total_seconds())
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)


def jobset(job: Described, environ: Mapping[str, str]) -> Manifest:
    """A ``JobSet`` of one indexed Job: a pod for each host, whose index is its number for torchrun."""
    node = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    once = replace(job, max_restarts=0)  # the JobSet starts all pods again
    command = torchrun.command(
        once, [*torchrun.placed(job, "0", f"{job.name}-node-0-0.{job.name}"), *torchrun.marked(job)]
    )
    command.remove("--node-rank=0")  # torchrun reads PET_NODE_RANK
    container = {
        "name": "train",
        "image": job.image,
        "command": [*map(_literal, command)],
        "env": [*_variables(job, environ), node],
        **_resources(job, "resources"),
    }
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    template: Manifest = {
        "completionMode": "Indexed",
        "parallelism": job.host_count,
        "completions": job.host_count,
        "backoffLimit": 0,
        "template": pod,
    }
    if job.time_limit is not None:
        template["activeDeadlineSeconds"] = int(job.time_limit.total_seconds())
    spec = {
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": template}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)


def _object(version: str, kind: str, job: Described, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def secret_name(job: Described) -> str:
    """The name of a job's Secret."""
    return f"{job.name}-secrets"


def _variables(job: Described, environ: Mapping[str, str]) -> list[Manifest]:
    def one(name: str, value: str) -> Manifest:
        if is_secret(name):
            return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": name}}}
        return {"name": name, "value": _literal(value)}

    return [one(name, value) for name, value in sorted(environ.items())]


def _literal(text: str) -> str:
    """A text in which Kubernetes puts no variables: it reads ``$(NAME)`` as its value, and ``$$`` as ``$``."""
    return text.replace("$", "$$")


def _resources(job: Described, name: str) -> Manifest:
    return {name: {"limits": {"nvidia.com/gpu": str(job.gpus_per_host)}}} if job.gpus_per_host else {}
