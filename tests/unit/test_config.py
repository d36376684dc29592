import json
import re
from dataclasses import FrozenInstanceError, fields

import pytest

from weft.config import Settings, describe, parse_assignments, resolve, with_named
from weft.errors import ConfigError, UsageError


def test_defaults():
    settings = resolve()
    assert settings == Settings()
    assert json.loads(settings.to_json()) == {
        "partitions": 1,
        "microbatches": 1,
        "pipeline": "1f1b",
        "devices": "alike",
        "rebalance": False,
        "compile": False,
        "executor": "graph",
        "memory_limit": 0.0,
        "schedule_file": "",
        "chunks": 2,
        "optimize": "auto",
        "memory_weight": 0.2,
        "auto_partition": True,
        "default_partition": 0,
        "active_microbatches": 3,
        "placement_strategy": "cluster",
        "contiguous": False,
        "ddp": False,
        "inputs": "equal",
        "all_reduce": "auto",
        "shard_optimizer_state": False,
        "min_replicas": 0,
        "offload_activations": False,
        "offload_optimizer": False,
        "offload_weights": False,
        "trainer_tokens": "",
        "chunked_loss": "auto",
        "sharded_data_parallel_degree": 1,
        "sharded_parameters_gathered": "step",
        "compression": "",
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "context_parallel_attention": "auto",
        "sequence_parallel": False,
        "expert_parallel_degree": 1,
        "experts": "auto",
        "heartbeat_timeout": 30.0,
        "wait_timeout": 600.0,
        "deterministic": False,
        "log_dir": "weft-log",
        "tensorboard": "",
        "checked": "first",
        "verify": "losses",
        "verify_report": "",
        "record": "",
        "record_steps": "all",
    }


def test_values_that_follow_from_others():
    assert Settings(optimize="speed").memory_weight == 0.2
    assert Settings(optimize="speed", memory_weight=1).memory_weight == 1.0
    assert Settings(partitions=4).active_microbatches == 6
    assert resolve({"partitions": 4, "active_microbatches": None}).active_microbatches == 6


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"shard_optimizer_state": True},
            'write "shard_optimizer_state": false, or "sharded_data_parallel_degree": 1',
        ),
        ({"compression": "int8"}, 'compression is "int8", which does not fit'),
    ],
)
def test_what_does_not_fit_sharded_parameters(given, text):
    with pytest.raises(ConfigError, match=text):
        Settings(sharded_data_parallel_degree=2, **given)


def test_the_degree_divides_the_processes():
    assert resolve({"sharded_data_parallel_degree": 2}, {}, 4).sharded_data_parallel_degree == 2
    text = '4 processes cannot be divided into groups of 3 .*: write "sharded_.*": 1 or 2 or 4'
    with pytest.raises(ConfigError, match=text):
        resolve({"sharded_data_parallel_degree": 3}, {}, 4)


def test_the_degree_divides_the_copies_of_a_pipeline():
    given = {"sharded_data_parallel_degree": 2, "partitions": 2}
    assert resolve(given, {}, 4).sharded_data_parallel_degree == 2
    text = "is 2, but 6 processes with 2 partitions make 3 replicas.* start a multiple of 4 processes"
    with pytest.raises(ConfigError, match=text):
        resolve(given, {}, 6)


def test_ranks_that_split_tensors_make_one_copy():
    given = {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2}
    assert resolve(given, {}, 4).sharded_data_parallel_degree == 2
    text = "with 1 partition and tensor_parallel_degree 2 make 1 replica.* multiple of 4 processes"
    with pytest.raises(ConfigError, match=text):
        resolve(given, {}, 2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"context_parallel_degree": 2},
            'write "context_parallel_degree": 1, or "expert_parallel_degree": 1',
        ),
        ({"verify": "gradients"}, 'each replica has some experts only: write "verify": "losses"'),
        (
            {"sharded_data_parallel_degree": 3},
            "is 2 and sharded_data_parallel_degree is 3: write two of which one",
        ),
        ({"expert_parallel_degree": 0}, "expert_parallel_degree is 0"),
    ],
)
def test_experts_over_replicas_do_not_fit_everything(given: dict, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Settings(**{"expert_parallel_degree": 2, **given})


def test_the_replicas_that_share_experts_divide_the_job():
    given = {"expert_parallel_degree": 2, "partitions": 2}
    assert resolve(given, {}, 8).expert_parallel_degree == 2
    text = "2 partitions make 3 replicas, which cannot be divided into groups of 2: start a multiple of 4"
    with pytest.raises(ConfigError, match=text):
        resolve(given, {}, 6)


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Settings().partitions = 2


def test_sources_win_key_by_key():
    environ = {
        "WEFT_CONFIG": '{"microbatches": 8, "pipeline_parallel_degree": 2}',
        "WEFT_SET": '{"microbatches": 4}',
    }
    settings = resolve({"partitions": 3, "microbatches": 1, "ddp": True}, environ)
    assert (settings.partitions, settings.microbatches, settings.ddp) == (2, 4, True)


def test_the_launch_configuration_may_be_a_file(tmp_path):
    path = tmp_path / "weft.json"
    path.write_text('{"partitions": 2}')
    assert resolve(environ={"WEFT_CONFIG": str(path)}).partitions == 2


def test_aliases():
    assert resolve({"pipeline_parallel_degree": 2}).partitions == 2
    assert resolve({"pipeline_parallel_degree": 2, "partitions": 2}).partitions == 2


def test_a_number_of_microbatches_that_is_left_open():
    assert Settings(microbatches=4).microbatch_count == 4
    with pytest.raises(UsageError, match=r'microbatches is "auto": the first step decides'):
        _ = Settings(microbatches="auto").microbatch_count


def test_digest_tells_settings_apart():
    assert Settings(wait_timeout=60).digest() == Settings(wait_timeout=60.0).digest()
    assert Settings(partitions=2).digest() != Settings().digest()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"partitions": "2"},
            r"""partitions is '2' \(the argument of init\), it must be a whole number from 1""",
        ),
        ({"partitions": "2"}, r'write "partitions": 2$'),
        (
            {"tensor_parallel_degree": "auto"},
            r"""tensor_parallel_degree is 'auto' .*: how many replicas .* depends on it.*weft tune finds it by try""",
        ),
        ({"partitions": True}, r"partitions is True .*it must be a whole number from 1 to 1000000"),
        ({"partitions": 2.0}, r'partitions is 2.0 .*write "partitions": 1'),
        ({"partitions": None}, r"partitions is None"),
        ({"microbatches": 0}, r'microbatches is 0 .*a whole number from 1 to 1000000, or "auto"'),
        ({"microbatches": "Auto"}, r"""microbatches is 'Auto'.*write "microbatches": "auto"$"""),
        ({"microbatches": "4"}, r'write "microbatches": 4$'),
        (
            {"microbatches": "auto", "pipeline": "file"},
            r'microbatches is "auto", but pipeline is "file".*write that number',
        ),
        (
            {"microbatches": "auto", "deterministic": True},
            r'microbatches is "auto", which follows measured times.*leave deterministic out',
        ),
        (
            {"pipeline": "Simpel"},
            r'it must be one of "1f1b", "gpipe", "interleaved_1f1b", .*: write "pipeline": "gpipe"',
        ),
        ({"optimize": "size"}, r'it must be one of "auto", "memory", "speed": write "optimize": "auto"'),
        ({"memory_weight": 1.5}, r"a number from 0 to 1: leave it out for what optimize and pipeline say"),
        ({"memory_weight": float("nan")}, r"memory_weight is nan"),
        ({"auto_partition": 1}, r"auto_partition is 1 .*it must be true or false"),
        ({"ddp": "True"}, r'write "ddp": true'),
        ({"active_microbatches": 0}, r"leave it out for partitions \+ 2"),
        ({"placement_strategy": "DPD"}, r'"cluster", "spread", "DPT", .* write "placement_strategy": "'),
        ({"heartbeat_timeout": 0}, r"it must be a number above 0: write \"heartbeat_timeout\": 30.0"),
        ({"wait_timeout": "10min"}, r"wait_timeout is '10min'"),
        ({"record": 1}, r'record is 1 .*it must be a text: write "record": ""'),
        ({"checked": "never"}, r'it must be one of "first", "always"'),
        (
            {"devices": "fast"},
            r'devices is .fast. .*it must be "alike", "measured", or a number above 0 for each',
        ),
        ({"devices": "1, 0", "partitions": 2}, r"devices is .1, 0. .*it must be"),
        (
            {"devices": "1, 2, 3", "partitions": 2},
            r"devices has 3 numbers .* for 2 partitions: write one for each",
        ),
        ({"compile": True}, r"compile is true, but there is one partition, .* model.compile\(\)"),
        (
            {"compile": True, "partitions": 2, "tensor_parallel_degree": 2},
            r'write "tensor_parallel_degree": 1, or "compile": false',
        ),
        (
            {"rebalance": True, "deterministic": True},
            r'deterministic is true, .* rebalance true: write "deterministic": false, or "rebalance": false',
        ),
        (
            {"rebalance": True, "auto_partition": False},
            r'write "auto_partition": true, or "rebalance": false',
        ),
        (
            {"rebalance": True, "pipeline": "auto"},
            r'pipeline is "auto", .* write "pipeline": "1f1b" or "gpipe" or',
        ),
        (
            {"rebalance": True, "tensor_parallel_degree": 2},
            r'write "tensor_parallel_degree": 1, or "rebalance": fa',
        ),
        (
            {"rebalance": True, "shard_optimizer_state": True},
            r'write "shard_optimizer_state": false, or "rebalance',
        ),
        (
            {"devices": "measured", "deterministic": True},
            r'devices is "measured", .* "devices": "1, 0.5" say',
        ),
        ({"default_partition": -1}, r"default_partition is -1 .*from 0 to"),
        (
            {"default_partition": 2, "partitions": 2},
            r"default_partition is 2, but 2 partitions are counted from 0",
        ),
        (
            {"tensor_parallel_degree": 2, "inputs": "first"},
            r'inputs is "first", which does not fit tensor_parallel_degree 2: write "inputs": "equal" or "per_rank"',
        ),
        (
            {"sequence_parallel": True},
            r'sequence_parallel is true, but tensor_parallel_degree is 1, .*write "tensor_parallel_degree": 2, say',
        ),
        ({"sequence_parallel": "yes"}, r"sequence_parallel is .yes. .*it must be true or false"),
        ({"microbatch": 2}, r'there is no setting "microbatch" .*did you mean "microbatches"\?'),
        ({"pipeline_parallel_degre": 2}, r'did you mean "pipeline_parallel_degree"\?'),
        ({"zzz": 2}, r'there is no setting "zzz" .*the settings are partitions, microbatches'),
        (
            {"partitions": 2, "pipeline_parallel_degree": 4},
            r'"partitions" and "pipeline_parallel_degree" .* have the values 2 and 4: leave one out',
        ),
    ],
)
def test_faults(values, text):
    with pytest.raises(ConfigError, match=text):
        resolve(values)


def test_faults_of_the_constructor_name_no_source():
    with pytest.raises(ConfigError, match=r"^microbatches is 0, it must be"):
        Settings(microbatches=0)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"WEFT_CONFIG": "/no/such/file.json"},
            r'WEFT_CONFIG: "/no/such/file.json" cannot be read',
        ),
        ({"WEFT_CONFIG": "{"}, r"WEFT_CONFIG is not JSON .*; write it as"),
        ({"WEFT_CONFIG": "[1]"}, r"WEFT_CONFIG holds \[1\]: write an object"),
        ({"WEFT_SET": "partitions=2"}, r"WEFT_SET is not JSON"),
        ({"WEFT_SET": '{"partitions": "x"}'}, r"partitions is 'x' \(WEFT_SET\)"),
    ],
)
def test_faults_of_the_environment(environ, text):
    with pytest.raises(ConfigError, match=text):
        resolve(environ=environ)


def test_a_wrong_argument():
    with pytest.raises(ConfigError, match=r"the argument of init is of type list: write a dict, for example"):
        resolve([("partitions", 2)])


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve({"partitions": 0, "microbatch": 2}, {"WEFT_CONFIG": "{"})
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 settings are wrong:"
    assert [line[:5] for line in lines[1:]] == ["  1. ", "  2. ", "  3. "]


@pytest.mark.parametrize(("partitions", "world_size"), [(1, 3), (2, 2), (2, 8), (3, 3)])
def test_world_sizes_that_fit(partitions, world_size):
    assert resolve({"partitions": partitions}, world_size=world_size).partitions == partitions


@pytest.mark.parametrize("name", ["tensor_parallel_degree", "context_parallel_degree"])
def test_world_size_must_be_a_multiple_of_partitions_times_ranks_of_axis_tp(name):
    settings = {"partitions": 2, name: 2}
    assert resolve(settings, world_size=8).tp_size == 2
    with pytest.raises(
        ConfigError, match=r"takes 4 processes .* has 6 processes: start a multiple of 4 processes"
    ):
        resolve(settings, world_size=6)


def test_both_degrees_together_make_axis_tp():
    settings = {"tensor_parallel_degree": 2, "context_parallel_degree": 3}
    assert resolve(settings, world_size=12).tp_size == 6
    text = r"tensor_parallel_degree is 2 and context_parallel_degree is 3 with 1 partition, which takes 6 processes"
    with pytest.raises(ConfigError, match=text):
        resolve(settings, world_size=4)


def test_sharers_must_divide_the_copies_beside_ranks_of_axis_tp():
    for name in ("tensor_parallel_degree", "context_parallel_degree"):
        text = rf"6 processes with 1 partition and {name} 2 make 3 replicas, which cannot be divided"
        with pytest.raises(ConfigError, match=text):
            resolve({name: 2, "sharded_data_parallel_degree": 2}, world_size=6)


def test_world_size_must_be_a_multiple_of_the_partitions():
    text = r'4 processes .* into pipelines of 3 partitions.*weft run -n 3.*write "partitions": 1 or 2 or 4'
    with pytest.raises(ConfigError, match=text):
        resolve({"partitions": 3}, world_size=4)


def test_assignments():
    texts = [
        "microbatches=4",
        "pipeline=gpipe",
        "ddp=true",
        "memory_weight=0.5",
        "placement_strategy=a=b",
        "x=",
    ]
    assert parse_assignments(texts) == {
        "microbatches": 4,
        "pipeline": "gpipe",
        "ddp": True,
        "memory_weight": 0.5,
        "placement_strategy": "a=b",
        "x": "",
    }


def test_faulty_assignments_are_reported_together():
    with pytest.raises(
        ConfigError, match=r'(?s)2 settings.*"partitions" sets nothing: write it as key=value.*"=2"'
    ):
        parse_assignments(["partitions", "=2"])


def test_every_setting_is_described():
    rows = describe()
    assert [row.name for row in rows] == [setting.name for setting in fields(Settings)]
    assert all(row.type and row.default and row.meaning for row in rows)
    row = next(row for row in rows if row.name == "memory_weight")
    assert row[1:3] == (
        "float",
        "what optimize and pipeline say",
    )


def test_settings_are_arguments_of_init_as_well():
    assert with_named({"partitions": 2}, {"microbatches": 4}) == {"partitions": 2, "microbatches": 4}
    assert with_named(None, {"partitions": 2}) == {"partitions": 2} and with_named([], {}) == []
    with pytest.raises(ConfigError, match="partitions is given to init twice, with two values"):
        with_named({"partitions": 2}, {"partitions": 4})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"experts": "ranks"}, "expert_parallel"), ({"experts": "parts"}, "expert_tensor_parallel"),
        ({"inputs": "apart"}, "per_rank"), ({"pipeline": "interleaved"}, "1f1b"), ({"pipeline": "GPipe"}, "gpipe"),
    ],
)  # fmt: skip
def test_a_value_has_a_second_name(given: dict[str, str], meant: str):
    (name,) = given
    assert getattr(resolve(given, {}, 1), name) == getattr(resolve({name: meant}, {}, 1), name) == meant


def test_a_misspelled_second_name_is_advised_as_what_it_means():
    with pytest.raises(ConfigError, match='inputs is \'aprt\'.*write "inputs": "per_rank"'):
        resolve({"inputs": "aprt"}, {}, 1)


@pytest.mark.parametrize(
    "given", [{"offload": {"optimizer": True}}, {"offload.optimizer": True}, {"offload_optimizer": True}]
)
def test_offloading_is_one_setting_or_two(given: dict):
    found = resolve(given)
    assert found.offload_optimizer and not found.offload_activations


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"offload": True},
            'no setting "offload" .* did you mean "offload_activations" or "offload_optimizer" or "offload_weights"',
        ),
        ({"offload": {"gradients": True}}, 'no setting "offload.gradients"'),
        (
            {"offload": {"optimizer": True}, "offload_optimizer": False},
            "are the same setting but have the values",
        ),
        ({"offload": {"optimizer": "yes"}}, "offload_optimizer is 'yes'"),
    ],
)
def test_faults_of_offloading_are_told(given: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        resolve(given)


def test_replicas_that_may_be_lost_are_whole():
    assert resolve({"min_replicas": 1, "partitions": 2}).min_replicas == 1
    for given, text in (
        ({"shard_optimizer_state": True}, "shard_optimizer_state is true, which does not fit min_replicas 1"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2, which does not fit min_replicas 1"),
        ({"microbatches": "auto"}, 'microbatches is "auto", which each replica would decide for itself'),
        ({"record": "somewhere"}, 'record is "somewhere", which does not fit min_replicas 1'),
    ):
        with pytest.raises(ConfigError, match=text):
            resolve({"min_replicas": 1, **given})
