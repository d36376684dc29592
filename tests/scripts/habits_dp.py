"""Things that scripts do with the backend smddp, one after another: each must not fail."""

import contextlib
import os

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="smddp", init_method="env://", world_size=world, rank=rank)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)


def wrapped(**options):
    return DDP(net(), device_ids=[rank], output_device=rank, **options)


def train(model, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        torch.manual_seed(10 * rank + number)
        loss = model(torch.randn(8, 4, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def the_same(values):
    everybody = [None] * world
    dist.all_gather_object(everybody, values)
    assert all(other == everybody[0] for other in everybody), everybody


# collectives
value = torch.full((3,), float(rank)).to(device)
dist.reduce(value, dst=0)
dist.all_reduce(value, op=dist.ReduceOp.MAX)
dist.all_gather_into_tensor(torch.empty(world * 3, device=device), torch.ones(3, device=device))
dist.all_gather_into_tensor(torch.empty(world * 2, device=device), torch.ones(1, 2, device=device))
part = torch.empty(2, device=device)
dist.reduce_scatter_tensor(part, torch.ones(2 * world, device=device))
assert part.tolist() == [world] * 2
told = [rank]
dist.broadcast_object_list(told, src=1)
assert told == [1]
dist.barrier(group=dist.new_group(list(range(world))), device_ids=[rank])
dist.all_reduce(torch.ones(4), async_op=True).wait()

train(wrapped(static_graph=True, gradient_as_bucket_view=True))
hooked = wrapped()
hooked.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
train(hooked)
uneven = wrapped()
train(uneven)
with uneven.join():
    train(uneven, steps=2 + rank)
the_same([parameter.sum().item() for parameter in uneven.parameters()])
shared = wrapped()
states = ZeroRedundancyOptimizer(shared.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
train(shared, states)
states.consolidate_state_dict(to=0)

# the first rank evaluates by itself, with and without no_grad; then all do
model = wrapped()
train(model)
model.eval()
if rank == 0:
    with torch.no_grad():
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))
model.train()
train(model, steps=1)
model.eval()
with torch.no_grad():
    the_same(model(torch.ones(2, 4))[0].item())

# accumulation with a scaler
model, scaler = wrapped(), torch.cuda.amp.GradScaler()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    last = number % 2 == 1
    with contextlib.nullcontext() if last else model.no_sync():
        with torch.cuda.amp.autocast(dtype=torch.float16):
            loss = model(torch.randn(8, 4, device=device)).float().pow(2).mean() / 2
        scaler.scale(loss).backward()
    if last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
the_same([parameter.sum().item() for parameter in model.parameters()])
dist.barrier()
if rank == 0:
    print(f"final loss {loss.item():.6f}")
