"""What two ranks must be told when they use the interface in the wrong place, several models in one step, and what
steps return."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

USAGE = """
import pytest, torch
from torch import nn
import weft.torch as weft
from weft.errors import ConfigError, UsageError

weft.init({"partitions": 2, "microbatches": 2})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
heard = []
model.register_post_partition_hook(lambda *given: heard.append(given))

def says(text):
    return pytest.raises(UsageError, match=text)

@weft.step
def train_step(model, x):
    assert not weft.is_tracing() or not model.partitioned
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

@weft.step
def nested(model, x):
    return train_step(model, x)

def before():
    with says(r"the model is split over partitions: call it inside a function decorated with @weft\\.step"):
        model(torch.ones(4, 4))
    for name in ("local_parameters", "local_buffers", "local_modules"):
        with says("is known only after the partition, which the first step makes"):
            list(getattr(model, name)())
    with says(r"local_state_dict\\(\\) is known only after the partition"):
        model.local_state_dict()
    with says("there is no partition yet: the first step makes it"):
        weft.partition_report()
    with says("DistributedDataParallel around a DistributedModel would average gradients a second time"):
        nn.parallel.DistributedDataParallel(model)
    assert not model.partitioned and not heard

def after():
    with says(r"the model is split over partitions: call it inside a function"):
        model(torch.ones(4, 4))
    with says("lives on partition . and was called on partition . outside of a step"):
        model.module(torch.ones(4, 4))
    with pytest.raises(ConfigError, match="weft is initialised with 2 partitions .cluster.; a repeated init cannot"):
        weft.init({"partitions": 1})
    with pytest.raises(ConfigError, match="a repeated init cannot make that 2 .spread."):
        weft.init({"partitions": 2, "placement_strategy": "spread"})
    weft.init({"partitions": 2, "microbatches": 4})

before()
losses = [train_step(model, torch.ones(4, 4)).reduce_mean().item()]
assert heard == [(model, optimizer)]
after()
optimizer.step()
losses.append(train_step(model, torch.ones(4, 4)).reduce_mean().item())
assert losses[1] < losses[0]
assert len(list(model.parameters())) == 4 and len(list(model.local_parameters())) == 2
assert len(optimizer.state) == 2 and len(optimizer.state_dict()["state"]) == 4
with says("train_step: a step cannot call another step"):
    nested(model, torch.ones(4, 4))
with says("the job cannot go on after a failed step: UsageError: train_step: a step cannot"):
    train_step(model, torch.ones(4, 4))
print("passed", flush=True)
"""


def test_using_things_in_the_wrong_place_is_told_on_every_rank():
    done = run_ranks(2, USAGE, warm=True).check()
    assert done.stdout.count("passed") == 2


OTHER_MEMORY = """
import pytest, torch
from torch import nn
import weft.torch as weft
from weft.errors import PeerError, UsageError

weft.init({"partitions": 2, "microbatches": 2})
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

@weft.step
def step(model, x):
    y = model(x).detach()
    HERE

told = "gives a tensor that goes from module to module other memory, .*: make a new"
with pytest.raises((UsageError, PeerError), match=told):  # that of the rank that came first
    step(model, torch.ones(4, 4))
print("passed", flush=True)
"""


@pytest.mark.parametrize("how", ["y.resize_(3, 1)", "y.resize_as_(x)", "y.data = torch.zeros(3)"])
def test_a_tensor_between_modules_cannot_get_other_memory(how: str):
    assert run_ranks(2, OTHER_MEMORY.replace("HERE", how), warm=True).check().stdout.count("passed") == 2


WRITTEN_ELSEWHERE = """
import pytest, torch
from torch import nn
import weft.torch as weft
from weft.errors import PeerError, UsageError

class Writes(nn.Linear):
    def forward(self, x):
        x += 1
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Writes(4, 4)

    def forward(self, x):
        h = self.first(x) * 2
        part, apart = h[:, 0], h.double()
        out = self.second(h)
        USED

weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
net = Net()
outputs = [net(part.clone()) for part in torch.ones(4, 4).chunk(2)]
alone = sum(out.sum() for out in outputs if not isinstance(out, tuple))
model = weft.DistributedModel(net)
weft.set_partition(net.second, 1)

@weft.step
def step(model, x):
    out = model(x)
    if isinstance(out, tuple):
        return out
    model.backward(out.square().mean())
    return out.sum()

if "part[" in "USED" or "(part" in "USED":
    with pytest.raises((UsageError, PeerError), match="uses a tensor that shares memory with one which another rank"):
        step(model, torch.ones(4, 4))
else:
    assert abs(step(model, torch.ones(4, 4)).reduce_sum().item() - alone) < 1e-4
print("passed", flush=True)
"""


@pytest.mark.parametrize(
    "used",
    [
        "return out + h + h[:, :1]", "return out + h + apart.float()", "return out + h + part[:, None]",
        "return (part, out)",
    ],
)  # fmt: skip
def test_a_view_of_what_another_rank_has_written_is_refused(used: str):
    assert (
        run_ranks(2, WRITTEN_ELSEWHERE.replace("USED", used), warm=True).check().stdout.count("passed") == 2
    )


RETURNED_ELSEWHERE = """
import pytest
import torch
from torch import nn
import weft.torch as weft
from weft.errors import PeerError, UsageError

class Passes(nn.Linear):
    def forward(self, x):
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.passes, self.last = nn.Linear(4, 4), Passes(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        same = self.passes(h)
        same += 1
        return self.last(same) + USED

weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
net = Net()
alone = sum(net(part).square().mean().item() for part in torch.ones(4, 4).chunk(2))
model = weft.DistributedModel(net)
weft.set_partition(net.passes, 1)

@weft.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

if "h" == "USED":
    with pytest.raises((UsageError, PeerError), match="uses a tensor that shares memory with one which another rank"):
        step(model, torch.ones(4, 4))
else:
    assert abs(step(model, torch.ones(4, 4)).reduce_sum().item() - alone) < 1e-4
print("passed", flush=True)
"""


@pytest.mark.parametrize("used", ["h", "same"])
def test_writing_into_what_another_rank_returned_of_its_input_makes_the_input_old(used: str):
    assert (
        run_ranks(2, RETURNED_ELSEWHERE.replace("USED", used), warm=True).check().stdout.count("passed") == 2
    )


MODELS = """
import copy, torch
from torch import nn
import weft.torch as weft

weft.init({"microbatches": 2, "partitions": 2})

def network(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))

nets = [network(width) for width in (5, 6, 7, 8)]
plain = [copy.deepcopy(net) for net in nets]
models = [weft.DistributedModel(net) for net in nets]
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

@weft.step
def together(models, x):
    for model in models:
        x = model(x)
    loss = x.square().mean()
    models[0].backward(loss)
    return loss

loss = together(models, x).reduce_mean()
y = x
for net in plain:
    y = net(y)
expected = y.square().mean()
expected.backward()
assert torch.allclose(loss, expected)
for model, net in zip(models, plain):
    whole = dict(net.named_parameters(prefix="module"))
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, whole[name].grad, rtol=1e-5, atol=1e-7), name
print("passed", flush=True)
"""


def test_several_models_in_one_step():
    done = run_ranks(2, MODELS, warm=True).check()
    assert done.stdout.count("passed") == 2


SCALES = """
import torch, torch.nn.functional as F
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False})
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.one(x)
        scales = [F.interpolate(x, scale_factor=scale) for scale in (0.5, 2.0, (1.0, 0.5), [0.5, 1.0])]
        rows = [x[[0, 1]], x[0, 1], x[0:1], x[(0, 1, None)]]
        return sum(self.two(scale).mean() for scale in scales) + sum(row.mean() for row in rows)

net = Net()
weft.set_partition(net.two, 1)
model = weft.DistributedModel(net)
x = torch.randn(4, 3, 8, 8)
with torch.no_grad():
    expected = torch.stack([net(half) for half in x.chunk(2)]).mean()

@weft.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss

assert torch.allclose(train_step(model, x).reduce_mean(), expected)
print("passed", flush=True)
"""


def test_calls_that_look_alike_and_return_other_shapes():
    done = run_ranks(2, SCALES, warm=True).check()
    assert done.stdout.count("passed") == 2


RETURNED = """
import torch
from torch import nn
import weft.torch as weft
from weft.torch.session import current
from weft.transport.channel import OUTPUT

weft.init({"partitions": 3, "microbatches": 4, "auto_partition": False, "default_partition": 0})
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
whole = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
whole.load_state_dict(net.state_dict())
model = weft.DistributedModel(net)
for place in range(3):
    weft.set_partition(net[place], place)
x = torch.linspace(-1, 1, 48).reshape(8, 6)

def returned(net, given, backward):
    y = net[0](given)
    twice = y * 2
    column = twice[:, 0]
    z = net[1](y)
    log = twice.logsumexp(1)  # the first call of its kind works on a copy of what an earlier segment has
    out = net[2](z)
    loss = out.square().mean()
    backward(loss)
    turned = z.detach() * 2
    turned.unsqueeze_(0)
    half = y.to(torch.float16)
    return {
        "losses": (loss, loss, z.mean()), "flags": [out > 0, out.argmax(-1)], "half": half, "odd": half[:1, :3],
        "large": out.repeat(1, 600), "turned": turned, "transposed": out.t(), "empty": out[:0], "input": given + 1,
        "weight": net[2].bias, "none": None, "constant": 3, "complex": torch.complex(z, z),
        "column": column, "twice": twice, "log": log,
    }

@weft.step
def step(model, x):
    return returned(net, x, model.backward)

def flat(tree):
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flat(item)]
    if isinstance(tree, (list, tuple)) and not isinstance(tree[0], int) and tree[0] is not None:
        return [leaf for item in tree for leaf in flat(item)]
    return [tree]

outputs = []
for number in range(3):
    result = step(model, x)
    if number == 0:
        send = current.session().pipeline.channel.send
        def counted(peer, message):
            outputs.append((peer, message.key)) if message.key.kind == OUTPUT else None
            send(peer, message)
        current.session().pipeline.channel.send = counted
alone = [returned(whole, part, lambda loss: None) for part in x.chunk(4)]
entries = flat(result)
for at, expected in enumerate(zip(*map(flat, alone))):
    if isinstance(expected[0], torch.Tensor):
        assert len(entries[at].outputs) == 4
        for one, other in zip(entries[at].outputs, expected):
            assert one.dtype == other.dtype and one.shape == other.shape, (at, one.shape, other.shape)
            torch.testing.assert_close(one, other.detach())
# By themselves go what was written into (of rank 1), and what is large and the bias (of rank 2).
by_themselves = {0: 0, 1: 4, 2: 8}[weft.rank()]
assert len(outputs) == 2 * 2 * (1 + by_themselves), outputs
print("passed", flush=True)
"""


def test_a_step_returns_everything_on_every_rank_and_sends_small_tensors_together():
    done = run_ranks(3, RETURNED, warm=True).check()
    assert done.stdout.count("passed") == 3


GROUPS = """
from pathlib import Path
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 2})
model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(2):
    train_step(model, torch.ones(4, 4))
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
before = names.count("gloo_tcp_loop")
torch.distributed.new_group([0, 1])
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
more = names.count("gloo_tcp_loop") - before  # PyTorch 2.11 gives these threads no name
print("polling: 2" if before == 2 * more else f"{before} threads, {more} for each group", flush=True)
"""


def test_a_pipeline_alone_has_no_group_of_one_rank():
    """Each of gloo's groups has a thread that wakes a hundred times a second, beside the work: one of the job, one of
    the pipeline."""
    done = run_ranks(2, GROUPS, warm=True).check()
    assert done.stdout.count("polling: 2") == 2, done.stdout


READERS = """
import sys
import weft.torch as weft
import smdistributed.modelparallel.torch as smp

settings = {"partitions": 1, "tensor_parallel_degree": 2}
if sys.argv[1] == "weft":
    weft.init(settings)
    assert (weft.dp_rank(), weft.dp_size(), weft.get_dp_group()) == (0, 1, [weft.rank()])
elif sys.argv[1] == "apart":
    weft.init({**settings, "inputs": "apart"})
    assert (weft.dp_rank(), weft.dp_size(), weft.get_dp_group()) == (weft.rank(), 2, [0, 1])
else:
    smp.init({**settings, "prescaled_batch": True})
    assert (smp.dp_rank(), smp.dp_size(), smp.rdp_size()) == (smp.rank(), 2, 1)
    assert weft.shared_sampler([1, 2, 3]).num_replicas == 1
"""


@pytest.mark.parametrize("who", ["weft", "apart", "smp"])
def test_dp_counts_ranks_that_read_other_samples(who):
    run_ranks(2, READERS, [who], timeout=60, warm=True, options=["--smdistributed"]).check()
