"""The divisions that weft itself can run, and the settings and the command for them."""

from __future__ import annotations

import json
import shlex
from typing import Any

from weft.machines.host import Machines
from weft.plan.parallelism.job import Division, Job


def cannot(job: Job | None, division: Division) -> str:
    """Why weft cannot run a division of a job today; empty if it can. No job: that of a traced model."""
    if job is not None and job.quantized:
        return f"linears of {job.quantized} bits were not tried with weft"
    if division.experts > 1 and division.context > 1:
        return "experts shared by replicas are not in weft beside context parallelism"
    if division.context > 1 and division.tensor > 1 and division.along:
        return "tokens sharded between layers that are split, beside context parallelism, are not in weft"
    if division.context > 1 and division.sharded != "none":
        return "sharing states or parameters among ranks that share sequences is not in weft"
    if job is not None and job.offload_weights and (division.sharded == "parameters" or division.experts > 1):
        return "weights that wait in host memory are not in weft where replicas share them"
    if division.schedule == "zb_2p":
        return "the schedule zb_2p is not in weft"
    if job is not None and job.precision == "fp8":
        return "products in fp8 are not in weft"
    return ""


def settings(division: Division, microbatches: int, job: Job | None = None) -> dict[str, Any]:
    """The settings of `weft.init` for a division that weft can run; no job: that of a traced model.

    >>> settings(Division(data=2, pipeline=4, microbatch=2), microbatches=8)
    {'partitions': 4, 'microbatches': 8, 'pipeline': '1f1b', 'placement_strategy': 'PDT'}
    """
    found: dict[str, Any] = {"partitions": division.pipeline, "microbatches": microbatches}
    if division.tensor > 1:
        found["tensor_parallel_degree"] = division.tensor
        found["sequence_parallel"] = division.along
    if division.context > 1:
        found["context_parallel_degree"] = division.context
    if division.experts > 1:
        found["expert_parallel_degree"] = division.experts
    if division.pipeline > 1:
        found["pipeline"] = division.schedule
    if division.pipeline > 1 and division.data > 1:
        found["placement_strategy"] = "PDT"  # replicas within a host, as the plan reckons
    if division.schedule == "interleaved_1f1b":
        found["chunks"] = division.chunks
    if division.sharded == "optimizer":
        found["shard_optimizer_state"] = True
    if job is not None and job.offload_optimizer:
        found["offload_optimizer"] = True
    if job is not None and job.offload_weights:
        found["offload_weights"] = True
    if division.sharded == "parameters":
        found["sharded_data_parallel_degree"] = division.data
        if division.pipeline * division.tensor > 1:
            found["sharded_parameters_gathered"] = "microbatch"  # as the plan reckons
    return found


def command(division: Division, microbatches: int, machines: Machines, job: Job | None = None) -> str:
    """The command that starts it; on several hosts by Open MPI, whose host names are to be written in."""
    each = machines.host.accelerators
    words = ["weft", "run", "-n", str(machines.size)]
    if machines.hosts > 1:
        hosts = ",".join(f"node{host}:{each}" for host in range(1, min(machines.hosts, 2) + 1))
        words += [
            "--engine",
            "mpirun",
            "--mpi-options",
            f"-H {hosts}" + (",..." if machines.hosts > 2 else ""),
        ]
    for name, value in settings(division, microbatches, job).items():
        words += ["--set", f"{name}={json.dumps(value).strip(chr(34))}"]
    return shlex.join([*words, "train.py"])
