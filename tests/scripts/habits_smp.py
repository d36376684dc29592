"""Things that scripts do around smp.step, one after another: each must not fail. habits_smp.py PARTITIONS FOLDER"""

import argparse
import copy
import pathlib
import random
import sys

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel

folder = sys.argv[2]
smp.init({"partitions": int(sys.argv[1]), "microbatches": 2, "ddp": True})
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


class Scaled(object):
    """Cut by its own method."""

    def __init__(self, tensor, scale):
        self.tensor, self.scale = tensor, scale

    def smp_slice(self, num_mb, mb, axis):
        n = self.tensor.shape[axis] // num_mb
        return Scaled(self.tensor.narrow(axis, mb * n, n), self.scale)


@smp.step(non_split_inputs=["class_weights"], input_split_axes={"seq": 1})
def train_step(model, batch, class_weights, seq, scaled, criterion, name="x"):
    out = model(batch["x"] * scaled.scale + scaled.tensor * 0)
    loss = (criterion(out, batch["y"]) * class_weights[batch["y"]]).mean() + seq.sum() * 0
    model.backward(loss)
    return {"loss": loss, "n": len(batch["x"]), "name": name, "none": None, "pair": (out, 1.5)}


@torch.jit.script
def padded(x: torch.Tensor):
    return torch.cat([x, torch.zeros(x.shape[0], 1)], 1) + torch.ones(1)


module = net()
module[0].bias.requires_grad = False
model = smp.DistributedModel(module.to(device))
model.train()
model.to(device)
plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
warmup = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: min(1.0, (step + 1) / 2))
optimizer = smp.DistributedOptimizer(plain)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
criterion = nn.CrossEntropyLoss(reduction="none").to(device)
torch.manual_seed(3)
batch = {"x": torch.randn(8, 8).to(device), "y": torch.randint(4, (8,)).cuda()}
rest = (torch.ones(4), torch.ones(3, 8), Scaled(batch["x"], 1.0), criterion)
for step in range(3):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    result = train_step(model, batch, *rest, name="hello")
    assert result["name"] == ["hello"] * 2 and result["n"] == [4, 4] and result["none"] is None
    assert torch.stack(result["loss"].outputs).mean() == result["loss"].reduce_mean()
    assert result["pair"][0].concat().shape == (8, 4) and result["pair"][1] == [1.5, 1.5]
    torch.nn.utils.clip_grad_norm_(model.local_parameters(), 100.0)
    optimizer.step()
    warmup.step()
    if smp.rank() == 0:
        print(f"loss {result['loss'].reduce_mean().item():.6f}")
plateau.step(result["loss"].reduce_mean().item())
for group in optimizer.param_groups:
    group["lr"] = 0.5e-2
assert padded(torch.ones(2, 1)).tolist() == [[2.0, 1.0]] * 2

# averages of weights, and what is counted
copy.deepcopy(model.module)
average = AveragedModel(model.module) if smp.pp_size() == 1 else copy.deepcopy(model)
assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net().parameters())

# layers that are frozen later
for name, parameter in model.named_parameters():
    if "4." in name:
        parameter.requires_grad = False
optimizer.zero_grad()
result = train_step(model, batch, *rest)
optimizer.step()

# torch.distributed beside smp
value = torch.ones(1).cuda()
dist.all_reduce(value, group=smp.get_dp_process_group())
assert value.item() == smp.dp_size()
value = torch.full((1,), 2.0)
dist.all_reduce(value, op=dist.ReduceOp.AVG)
assert value.item() == 2
everybody = [None] * smp.size()
dist.all_gather_object(everybody, smp.rank())
assert everybody == list(range(smp.size()))
assert dist.get_world_size(smp.get_pp_process_group()) == smp.pp_size()
smp.core.barrier()

# files with more than tensors
random.seed(1)
content = {
    "args": argparse.Namespace(lr=0.1, folder=pathlib.Path(folder)),
    "python": random.getstate(),
    "numpy": np.random.get_state(),
    "cuda": torch.cuda.get_rng_state_all(),
    "best": np.float64(0.5),
    "loss": result["loss"].reduce_mean(),
}
smp.save(content, f"{folder}/habits.pt", partial=True)
back = smp.load(f"{folder}/habits.pt", map_location=lambda storage, place: storage.cuda(smp.local_rank()))
assert back["args"].lr == 0.1 and back["args"].folder == pathlib.Path(folder) and back["best"] == 0.5
random.setstate(back["python"])
np.random.set_state(back["numpy"])
torch.save(content, f"{folder}/plain{smp.rank()}.pt")
assert torch.load(f"{folder}/plain{smp.rank()}.pt", map_location="cuda:0")["args"].lr == 0.1
if smp.dp_rank() == 0:
    state = model.state_dict()
    if smp.rank() == 0:
        net().load_state_dict({key.replace("module.", ""): tensor for key, tensor in state.items()})
smp.barrier()
if smp.rank() == 0:
    print(f"final loss {result['loss'].reduce_mean().item():.6f}")
