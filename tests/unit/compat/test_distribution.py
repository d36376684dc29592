"""The original's `distribution`: what it means here, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.compat.distribution import mpi_options, read
from weft.errors import ConfigError

SPLIT = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4}}}
}
MPI = {
    "mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x NCCL_DEBUG=INFO --tag-output"}
}


def parameters(**given: Any) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": given}}}


def test_the_split_of_a_model_under_mpi(tmp_path):
    told = read({**SPLIT, **MPI})
    assert (told.engine, told.processes_per_host) == ("mpirun", 8)
    assert told.parameters == {"partitions": 2, "microbatches": 4}
    assert told.variables == {"NCCL_DEBUG": "INFO"} and told.mpi_options == ["--tag-output"]
    path = tmp_path / "distribution.json"
    path.write_text(json.dumps({**SPLIT, **MPI}))
    assert read(str(path)) == read(json.dumps({**SPLIT, **MPI})) == told


def test_parameters_in_a_file(tmp_path):
    path = tmp_path / "parameters.json"
    path.write_text('{"partitions": 4}')
    given = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": str(path)}}}
    assert read(given).parameters == {"partitions": 4}


def test_parameters_reach_scripts_of_both_kinds():
    told = read(
        parameters(pipeline_parallel_degree=2, ddp=True, ddp_port=7, pipeline="_only_forward")
    ).settings()
    assert json.loads(told["SM_HP_MP_PARAMETERS"])["ddp_port"] == 7
    own = json.loads(told["WEFT_CONFIG"])
    assert own["partitions"] == 2 and own["pipeline"] == "simple" and "ddp_port" not in own


@pytest.mark.parametrize(
    ("given", "engine", "framework"),
    [
        ({"torch_distributed": {"enabled": True}}, "torchrun", {"sagemaker_torch_distributed_enabled": True}),
        ({"pytorchddp": {"enabled": True}}, "mpirun", {"sagemaker_distributed_dataparallel_enabled": True}),
        (
            {"smdistributed": {"dataparallel": {"enabled": True}}},
            "",
            {"sagemaker_distributed_dataparallel_enabled": True},
        ),
        ({"mpi": {"enabled": False, "processes_per_host": 3}}, "", {}),
        ({"smdistributed": {"modelparallel": {"enabled": False, "parameters": {"partitions": 2}}}}, "", {}),
        ({}, "", {}),
    ],
)
def test_what_is_enabled_counts(given, engine, framework):
    told = read(given)
    assert (told.engine, told.framework) == (engine, framework)
    assert told.processes_per_host is None and told.parameters == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[1]", "distribution"),
        ("{", "distribution: distribution is not JSON"),
        ("nowhere.json", '"nowhere.json" cannot be read'),
        ({"horovod": {"enabled": True}}, "horovod is not known: it is one of smdistributed, mpi"),
        ({"mpi": True}, r'mpi is True: write an object, for example \{"enabled": true\}'),
        ({"mpi": {"enabled": "yes"}}, "enabled of mpi is 'yes': write true or false"),
        ({"smdistributed": {}}, "smdistributed has nothing: give one of modelparallel and dataparallel"),
        (
            {"smdistributed": {"modelparallel": {}, "dataparallel": {}}},
            "smdistributed has modelparallel, dataparallel: give one of",
        ),
        (
            {"mpi": {"enabled": True}, "torch_distributed": {"enabled": True}},
            "mpi and torch_distributed both start processes: enable one",
        ),
        (
            {"pytorchddp": {"enabled": True}, "smdistributed": {"dataparallel": {"enabled": True}}},
            "pytorchddp and smdistributed.dataparallel mean the same",
        ),
        ({"mpi": {"enabled": True, "processes_per_host": "8"}}, "processes_per_host is '8': write a whole"),
        ({"mpi": {"enabled": True, "x": object()}}, "distribution has a value that JSON has not"),
        (parameters(pipeline="fast"), "pipeline is 'fast': it is one of simple, interleaved, _only_forward"),
        (parameters(optimize="cost"), "optimize is 'cost': it is one of speed, memory"),
        (parameters(placement_strategy="DDP"), "placement_strategy is 'DDP': it is spread, cluster, or D, P"),
        (parameters(partitions=0), "partitions is 0: write a whole number of at least 1"),
        (parameters(ddp="yes"), "ddp is 'yes': write true or false"),
        (parameters(memory_weight=2), "memory_weight is 2: write a number from 0 to 1"),
        (parameters(ddp=True, horovod=True), "ddp and horovod exclude each other"),
        (parameters(ddp_port=1), "ddp_port needs ddp: add it"),
        (parameters(auto_partition=False, partitions=2), "default_partition is None: without auto_partition"),
        (parameters(auto_partition=False, partitions=2, default_partition=2), "default_partition is 2"),
    ],
)
def test_what_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        read(given)


@pytest.mark.parametrize("strategy", ["spread", "cluster", "TPD", "DPT", "PTD"])
def test_placements(strategy: str):
    assert read(parameters(placement_strategy=strategy)).parameters == {"placement_strategy": strategy}


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError, match="pipeline is 'x': .*; partitions is 0: "):
        read(parameters(pipeline="x", partitions=0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ({}, [], [])),
        ("--NCCL_DEBUG WARN", ({"NCCL_DEBUG": "WARN"}, [], [])),
        ("--NCCL_DEBUG=WARN -x FI_PROVIDER", ({"NCCL_DEBUG": "WARN"}, ["FI_PROVIDER"], [])),
        ("-x FOO='a b'", ({"FOO": "a b"}, [], [])),
        (["-x", "FOO=a b"], ({"FOO": "a b"}, [], [])),
        ("--mca btl_tcp_if_include eth0", ({}, [], ["--mca", "btl_tcp_if_include", "eth0"])),
        ("-verbose --bind-to none", ({}, [], ["-verbose", "--bind-to", "none"])),
    ],
)
def test_options_of_mpirun(text, found):
    assert mpi_options(text) == found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (7, "custom_mpi_options is 7: write a text, or a list of texts"),
        (["-x", 7], "custom_mpi_options is .'-x', 7.: write a text, or a list of texts"),
        ("-x FOO='a", "cannot be read: No closing quotation"),
        ("--mca plm_rsh_agent /tmp/x", "has --mca plm_rsh_agent /tmp/x: give"),
        ("-mca mca_base_component_path /tmp", "has -mca mca_base_component_path /tmp"),
        ("--prefix /tmp", "has --prefix, /tmp"),
        ("-np 4", "has -np, 4"),
        ("a.out ; rm", "has a.out, ;, rm"),
        ("-mca btl", "has -mca btl "),
        ("-x", "has -x "),
        ("-x 1A=2", "has -x 1A"),
    ],
)
def test_options_of_mpirun_that_are_refused(text, fault):
    with pytest.raises(ConfigError, match=fault):
        mpi_options(text)
