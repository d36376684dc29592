"""Parts of the second version in a job of one process: delayed weights, refused uses, checkpoints that do not fit."""

from __future__ import annotations

import pytest

from tests.unit.compat.test_names import python

BEGIN = """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
import torch, weft.compat
weft.compat.enable()
import torch.distributed as dist
import torch.sagemaker as tsm
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def told(words, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        assert words in str(error), (words, type(error), str(error))
    else:
        raise AssertionError(f"not refused: {words}")

told("state.tp_rank is known after torch.sagemaker.init()", lambda: tsm.state.tp_rank)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

DELAYED = """
tsm.init({})
from torch.sagemaker.delayed_param import DelayedParamIniter
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

def made(build, **kwargs):
    with torch.device("meta"):
        model = build()
    initer = DelayedParamIniter(model, **kwargs)
    with initer.validate_params_and_buffers_inited():
        FSDP(model, param_init_fn=initer.get_param_init_fn(), use_orig_params=True, device_id=torch.device("cpu"))
    return model

sizes = dict(n_embd=64, n_layer=8, n_head=2, n_positions=16, vocab_size=128)
config = GPT2Config(**sizes)
late, early = made(lambda: GPT2LMHeadModel(config)), GPT2LMHeadModel(config)
assert late.lm_head.weight.data_ptr() == late.transformer.wte.weight.data_ptr()
for (name, one), (_, other) in zip(late.named_parameters(), early.named_parameters(), strict=True):
    a, b = one.float().std(correction=0), other.float().std(correction=0)
    assert abs(a - b) <= 0.1 * b, (name, a, b)
for (name, one), (_, other) in zip(late.named_buffers(), early.named_buffers(), strict=True):
    assert torch.equal(one, other), name
config = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
    max_position_embeddings=16,
)
late, early = made(lambda: LlamaForCausalLM(config)), LlamaForCausalLM(config)
for (name, one), (_, other) in zip(late.named_buffers(), early.named_buffers(), strict=True):
    assert torch.equal(one, other), name

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

told("nothing gives values to Own.scale: give DelayedParamIniter(model, init_method_using_config=", made, Own)

def fill(module):
    if isinstance(module, Own):
        nn.init.constant_(module.scale, 2)

own = made(Own, init_method_using_config=fill)
assert own.scale.eq(2).all() and own.norm.running_var.eq(1).all()

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3))

told("nothing gives values to Table.table", made, Table)
with torch.device("meta"):
    left = nn.Linear(2, 2)

def unfilled():
    with DelayedParamIniter(left).validate_params_and_buffers_inited():
        pass

told("weight, bias got no values: give FSDP param_init_fn", unfilled)
told("rank 0 has no values of weight: let rank 0 make the model", tsm.transform, left, load_state_dict_from_rank0=True)
print("done")
"""

FILES = """
tsm.init({"hybrid_shard_degree": 1})
from torch.distributed.fsdp import ShardingStrategy
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save
from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state, sm_state_dict_type
from torch.sagemaker.grad_norm import clip_grad_norm_
import sys
folder = sys.argv[1]

told("both say which ranks share the parameters", FSDP, nn.Linear(2, 2), process_group=dist.group.WORLD)
told("transform got config=dict", tsm.transform, nn.Linear(2, 2), config={})
assert tsm.transform(folder) is folder
inside = nn.Sequential(FSDP(nn.Linear(2, 2), device_id=torch.device("cpu")))
told("give it the outermost FSDP module", clip_grad_norm_, inside, 1.0)
told("give SMStateDictType.SM_LOCAL_STATE_DICT", lambda: sm_state_dict_type(inside, "full").__enter__())
told("torch.sagemaker.state' has no attribute 'unknown'", lambda: tsm.state.unknown)

def parts():
    torch.manual_seed(3)
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

model, optimizer = parts()
model(torch.ones(1, 2)).sum().backward()
told("optimizer with gradients: call it before", init_optim_state, optimizer)
optimizer.step()
async_save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, folder)
fresh, other = parts()
states = {"optimizer": other.state_dict(), "step": 0}
told("have other states, 0.exp_avg, 0.exp_avg_sq, 0.step: call init_optim_state(optimizer)", load, states, folder)
before = [weight.clone() for weight in fresh.parameters()]
init_optim_state(other)
assert all(map(torch.equal, before, fresh.parameters()))
states = {"model": fresh.state_dict(), "optimizer": other.state_dict(), "step": 0}
load(states, folder)
other.load_state_dict(states["optimizer"])
assert states["step"] == 4 and all(map(torch.equal, model.parameters(), fresh.parameters()))
for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
    assert all(torch.equal(one[name], two[name]) for name in one)
for hidden in ({"optimizer": other.state_dict()}, [other.state_dict()], [other]):
    told("an optimizer's: its state has this rank's shares only", async_save, {"app": hidden}, folder)
told("an optimizer's: its state", async_save, {"optimizer": other}, folder)
told("give a folder that all ranks see", async_save, {}, "s3://bucket/key")
told("neither checkpoint_id nor storage_reader", load, {})
tsm.init({})
FSDP(nn.Linear(2, 2), process_group=dist.group.WORLD, device_id=torch.device("cpu"))
print("done")
"""


@pytest.mark.parametrize("code", [DELAYED, FILES], ids=["delayed", "files"])
def test_in_one_process(code, tmp_path):
    code = code.replace("sys.argv[1]", repr(str(tmp_path / "kept")))
    assert python(BEGIN + code, PYTHONWARNINGS="ignore")[-1] == "done"
