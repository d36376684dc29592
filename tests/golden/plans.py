"""One job as every engine wants it. Its texts hold what a shell would read wrongly, and a secret."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from weft.launch.job import Job
from weft.launch.rank import FILE
from weft.launch.remote import agent

SECRET = "hf_0123456789"
ENVIRON = {"HF_TOKEN": SECRET, "WEFT_TOKEN": "0f" * 16, "NOT_NAMED": "stays here"}
GIVEN: dict[str, Any] = {
    "script": "train.py",
    "arguments": ["--lr", "0.001", "--note", "it's; $(HOME) `here`"],
    "settings": {"partitions": 4},
    "variables": {"NCCL_DEBUG": "INFO", "NOTE": "a 'b' $c"},
    "hand_on": ["HF_TOKEN"],
    "ranks_per_host": 4,
}
TWO = ["node1", "node2"]
JOBS = {
    "local": Job(**GIVEN),
    "ssh": Job(**GIVEN, engine="ssh", hosts=TWO),
    "torchrun-one-host": Job(**GIVEN, engine="torchrun"),
    "torchrun": Job(**GIVEN, engine="torchrun", hosts=TWO, max_restarts=3, log_dir="runs/a"),
    "mpirun-open-mpi-4": Job(**GIVEN, engine="mpirun", hosts=TWO, mpi_options=["--bind-to", "none"]),
    "mpirun-open-mpi-5": Job(**GIVEN, engine="mpirun", hosts=TWO, form="openmpi5"),
    "mpirun-in-an-allocation": Job(**GIVEN, engine="mpirun", hosts=2),
    "mpirun-mpich": Job(**GIVEN, engine="mpirun", hosts=TWO, form="mpich"),
    "slurm": Job(
        **GIVEN, engine="slurm", hosts=2, time_limit=timedelta(hours=2), max_restarts=5, log_dir="runs/50% of it",
        gpus_per_host=4,
    ),
    "slurm-module": Job("package.train", module=True, engine="slurm"),
    "ray": Job(**GIVEN, engine="ray", hosts=2, max_restarts=2),
    "kubernetes-trainjob": Job(**GIVEN, engine="kubernetes", hosts=2, image="registry/train:1", gpus_per_host=4),
    "kubernetes-jobset": Job(
        **GIVEN, engine="kubernetes", form="jobset", hosts=2, image="registry/train:1", max_restarts=3,
        time_limit=timedelta(hours=2),
    ),
    "skypilot": Job(**GIVEN, engine="skypilot", hosts=2),
}  # fmt: skip


def plan_text(job: Job) -> str:
    """The plan for reading, without the folder that weft is installed in."""
    return f"{job.plan(ENVIRON)}\n".replace(FILE, "weft/launch/rank.py").replace(
        agent.FILE, "weft/launch/remote/agent.py"
    )
