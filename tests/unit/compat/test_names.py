"""The names of smdistributed: where they are found, and by whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.launching import SOURCE
from weft.compat.enable import FOLDER, launch_environ, mp_parameters, open_mpi_environ
from weft.compat.modelparallel.loss_scale import LossScale
from weft.compat.modelparallel.parameters import read
from weft.compat.variables import DEFAULTS, FRAMEWORK, PARAMETERS
from weft.errors import ConfigError, UsageError


def python(code, *command, **env):
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SM_", "WEFT_"))}
    environ |= {"PYTHONPATH": str(SOURCE), **env}
    done = subprocess.run(
        [sys.executable, *command, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FIND = "import importlib.util as u; print(u.find_spec('smdistributed') is not None)"


def test_the_names_are_there_only_for_who_asks():
    assert python(FIND) == ["False"]
    assert python(FIND, "-m", "weft.compat.python") == ["True"]
    assert python(f"import weft.compat; weft.compat.enable(); weft.compat.enable(); {FIND}") == ["True"]


def test_all_names_import_and_do_nothing_where_nothing_is_split():
    code = """
import torch
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FlashAttentionLayer, FusedLayerNorm, DistributedLinear
from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel import __version__
import smdistributed.dataparallel.torch.distributed, smdistributed.dataparallel.torch.parallel.distributed
assert __version__ == smp.__version__
smp.init({"microbatches": 2}); smp.init()
assert smp.state is state and state.cfg.microbatches == 2 and hasattr(state.cfg, "fp16") and not state.cfg.fp16
assert state.cfg.pipeline == "interleaved"
assert smp.DP_GROUP is smp.CommGroup.DP_GROUP and smp.PP_RANK is smp.RankType.PP_RANK
qkv = torch.randn(2, 5, 3, 4, 8)
layer = FlashAttentionLayer(attention_head_size=8).eval()
q, k, v = qkv.permute(2, 0, 3, 1, 4)
want = torch.softmax((q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(5, 5).triu(1) > 0, -1e9), -1) @ v
assert torch.allclose(layer(qkv, torch.zeros(2, 1, 1, 5), causal=True), want, atol=1e-5)
assert torch.allclose(layer(qkv, causal=True), want, atol=1e-5)
with smp.tensor_parallelism(), smp.model_creation(dtype=torch.float64):
    net = torch.nn.Sequential(DistributedLinear(4, 4), torch.nn.Linear(4, 1))
assert net[0].weight.dtype == torch.float64
model = smp.DistributedModel(net, "cpu")
assert smp.DistributedModel(net) is model
for kind in (smp.optimizers.FusedAdam, smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad):
    optimizer = kind(model.parameters(), lr=0.01)
    before = model(torch.ones(3, 4, dtype=torch.float64)).sum()
    optimizer.zero_grad(); before.backward(); optimizer.step()
    assert model(torch.ones(3, 4, dtype=torch.float64)).sum() < before
for name in ("bert", "gpt2", "gptj", "gptneo", "roberta"):
    module = globals()[name]
    assert getattr(module, f"translate_state_dict_to_hf_{name}")({"a": 1}, max_seq_len=8) == {"a": 1}
    assert getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")({"a": 1}) == {"a": 1}
for name in ("gptj", "gptneo"):
    assert callable(getattr(globals()[name], f"get_hf_{name}_transformer_layer_hooks"))
device = torch.device("cuda", 3)
assert isinstance(device, torch.device) and device.type == "cpu" and torch.device("meta").type == "meta"
x = torch.ones(2, device="cuda").cuda().to("cuda:0").pin_memory()
with torch.cuda.amp.autocast():
    assert torch.nn.Linear(2, 2).cuda()(x).dtype == torch.bfloat16
torch.cuda.synchronize(); assert torch.cuda.current_device() == 0 and torch.cuda.is_available()
print("good")
"""
    assert python(code, "-m", "weft.compat.python", WEFT_DEVICE="cpu", CUDA_VISIBLE_DEVICES="") == ["good"]


def test_who_wins_among_settings():
    launch = {PARAMETERS: '{"partitions": 4, "microbatches": 8}'}
    own = read({"pipeline_parallel_degree": 2, "fp16": True}, launch)
    assert own.own == {"partitions": 4, "microbatches": 8} and own.kept["fp16"] is True
    assert read({"partitions": 2}, {**launch, DEFAULTS: "1"}).own["partitions"] == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both on"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "leave one out"),
        ({"fp16": 1}, 'write "fp16": true or false'),
        ({"horovod": True, "ddp": True}, "exclude each other"),
    ],
)
def test_settings_that_cannot_be(given, text):
    with pytest.raises(ConfigError, match=text):
        read(given, {})


def test_settings_of_sharding_and_offloading_are_wefts_own():
    given = {"shard_optimizer_state": True, "offload_activations": True, "sharded_data_parallel_degree": 2}
    found = read({**given, "sdp_gradient_clipping": 0.5, "activation_loading_horizon": 2}, {})
    assert found.own == given and found.kept["sdp_gradient_clipping"] == 0.5
    assert found.kept["activation_loading_horizon"] == 2


def test_unknown_settings_are_warned_about():
    with pytest.warns(UserWarning, match="unknown settings are ignored: microbatchs"):
        read({"microbatchs": 2, "static_mode": True}, {})


@pytest.mark.parametrize("text", ["{", "[1]", "/no/such/file"])
def test_launch_settings_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match=PARAMETERS):
        read({}, {PARAMETERS: text})


def test_what_a_launch_adds():
    added = launch_environ({"PYTHONPATH": "/a"}, ["x.py"], partitions=2, device="cpu")
    assert added["PYTHONPATH"] == f"{FOLDER}{os.pathsep}/a"
    assert json.loads(added[PARAMETERS]) == {"partitions": 2} and added[DEFAULTS] == "1"
    assert json.loads(added[FRAMEWORK]) == {"sagemaker_mpi_enabled": True}
    assert PARAMETERS not in launch_environ({PARAMETERS: "{}"}, [], partitions=2)
    added = launch_environ({}, ["x.py", "--mp_parameters", "partitions=2,ddp=True,pipeline=simple"])
    assert json.loads(added[PARAMETERS]) == {"partitions": 2, "ddp": True, "pipeline": "simple"}
    data_parallel = {FRAMEWORK: '{"sagemaker_distributed_dataparallel_enabled": true}'}
    assert PARAMETERS not in launch_environ(data_parallel, [], partitions=2)
    with pytest.raises(ConfigError, match="write name=value pairs"):
        mp_parameters(["--mp_parameters=2"])
    with pytest.raises(ConfigError, match=FRAMEWORK):
        launch_environ({FRAMEWORK: "{"})


def test_arguments_of_the_loss_scale():
    scale = LossScale.of(True, None, True, {"init_scale": 8, "delayed_shift": 2})
    for expected in (8.0, 4.0, 2.0):
        scale.update(True)
        assert scale.loss_scale == expected
    assert LossScale.of(False, None, True, {}).loss_scale == 1.0
    with pytest.raises(UsageError, match="has no argument scale_windw"):
        LossScale.of(True, None, True, {"scale_windw": 2})
    with pytest.raises(UsageError, match="give a number above 0"):
        LossScale.of(True, -1.0, False, {})


CUDA = """
import torch, weft.compat
weft.compat.enable()
import torch.nn.parallel, torch.distributed as dist
first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
first.record(); last.record()
assert last.query() and 0 <= first.elapsed_time(last) < 60_000
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream(priority=-1))
assert isinstance(torch.cuda.device, type)
assert torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.get_device_properties(0).total_memory > 2**28
assert 0 < torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info()[1] and torch.cuda.get_device_name(0)
assert torch.cuda.FloatTensor([1.0]).dtype == torch.float32
assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.half
assert torch.zeros(2).type() == "torch.FloatTensor" and isinstance(torch.zeros(2), torch.cuda.FloatTensor)
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator) and torch.rand(1, generator=generator).shape == (1,)
assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state()) and torch.cuda.get_rng_state_all()
torch.cuda.set_rng_state_all([]); torch.cuda.current_blas_handle(); torch.cuda.memory_summary()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
exec(compile("import torch; there = torch.cuda.is_available()", torch.__file__, "exec"), names := {})
assert not names["there"]
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0], output_device=0)
"""


def test_names_of_cuda_answer_on_a_cpu_and_libraries_are_not_told_that_it_is_there():
    python(CUDA, WEFT_DEVICE="cpu")


KEPT = """
import sys, torch, weft.compat
weft.compat.enable()
import smdistributed.modelparallel.torch as smp
class Config:
    layers = 4
smp.init({"microbatches": 2})
model = smp.DistributedModel(torch.nn.Linear(2, 2))
assert model.module.module is model.module
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
for partial in (True, False):
    content = {"model_config": [Config()], "step": 3}
    kept = {"model": model, "optimizer": optimizer, "user_content": content}
    smp.save_checkpoint(sys.argv[1], tag=f"t{partial}", partial=partial, **kept)
    found = smp.resume_from_checkpoint(sys.argv[1], tag=f"t{partial}", partial=partial)
    print(found["step"], getattr(found["model_config"][0], "layers", "unread"))
"""


@pytest.mark.parametrize(("allowed", "config"), [("", "unread"), ("1", "4")])
def test_objects_are_saved_as_they_are_and_read_where_the_job_allows_it(tmp_path, allowed, config):
    code = KEPT.replace("sys.argv[1]", repr(str(tmp_path)))
    assert python(code, WEFT_DEVICE="cpu", WEFT_ALLOW_PICKLE=allowed) == ["3", config, "3", config]


def test_open_mpi_names_are_there_under_weft_run():
    ours = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    told = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert open_mpi_environ({**ours, "WEFT_SHARED_FD": "3"}) == {
        f"OMPI_COMM_WORLD_{name}": text for name, text in told.items()
    }
    assert (
        open_mpi_environ(ours) == open_mpi_environ({"OMPI_COMM_WORLD_RANK": "0", "WEFT_SHARED_FD": "3"}) == {}
    )


SHARED, TENSORS = {"sharded_data_parallel_degree": 2}, {"tensor_parallel_degree": 2}


@pytest.mark.parametrize(
    ("script", "partitions"),
    [
        ({}, 4),
        (SHARED, 1),
        ({"sharded_data_parallel_degree": 1}, 4),
        ({**SHARED, "partitions": 4}, 4),
        (TENSORS, 2),
        ({**TENSORS, "context_parallel_degree": 2}, 1),
        ({**TENSORS, "pipeline_parallel_degree": 1}, 1),
        ({"tensor_parallel_degree": 8}, 1),
    ],
)
def test_the_default_of_the_launch_gives_way_to_what_the_script_does_with_ranks(script, partitions):
    environ = launch_environ({}, [], partitions=4)
    assert read(script, environ).own["partitions"] == partitions
    assert read(TENSORS, {**environ, "WEFT_SET": json.dumps(TENSORS)}).own["partitions"] == 4, "it knew"


LAYERS = """
import weft.compat
weft.compat.enable()
import transformers
size = {"vocab_size": 20, "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8}
gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, add_cross_attention=True))
gptj = transformers.GPTJForCausalLM(transformers.GPTJConfig(**size, rotary_dim=2))
kinds = [[["global", "local"], 1]]
small = {"vocab_size": 20, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": kinds}
gptneo = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**small))
for model in (gpt2, gptj, gptneo):
    layers = model.transformer.seq_layers
    assert layers is model.transformer.h and not any("seq_layers" in name for name in model.state_dict())
    assert all(each.attention is each.attn and each.output is each.mlp for each in layers)
assert gpt2.transformer.seq_layers[1].cross_attention is gpt2.transformer.h[1].crossattention
print("good")
"""


def test_models_of_transformers_answer_to_the_names_that_their_layers_have_in_the_original():
    pytest.importorskip("transformers")
    assert python(LAYERS)[-1:] == ["good"]
