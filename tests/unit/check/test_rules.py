"""Each rule finds its fault, with the line to write, and nothing in a script that is right."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.unit.check.scripts import COPIES, RIGHT, changed, found
from tests.unit.test_docs import ROOT
from weft.check import RULES, Given, Grade

SAMPLER = "DistributedSampler(data, num_replicas=weft.dp_size(), rank=weft.dp_rank())"
MADE = f"sampler = {SAMPLER}\n"
LOADER = "DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)"
SHUFFLED = [(MADE, ""), (LOADER, "DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)")]
UNSEEDED = [*SHUFFLED, ("    sampler.set_epoch(epoch)\n", "")]
STEPPED, RETURNED, NOW = "        optimizer.step()", "    return loss", "        if weft.rank"
WRONG, SLOW, HINT = Grade


FORWARD = """
class Net(torch.nn.Module):
    def forward(self, x):
        hidden = self.layer(x)
        HERE
        return self.head(hidden)
"""
EVALUATION = """
def evaluate(net, test):
    net.eval()
    total = 0.0
    for x, y in test:
        total += (net(x) - y).square().mean().detach()
    return total
evaluate(model, loader)
"""


class Case(NamedTuple):
    """A script with one fault, and what is found in it."""

    rule: str
    grade: Grade
    text: str
    line: str
    write: str
    given: Given | None = None


CASES = [
    Case(
        "loader_not_sharded", HINT, changed(RIGHT, *UNSEEDED), "loader = DataLoader",
        f"DataLoader(data, batch_size=BATCH, drop_last=True, sampler=torch.utils.data.distributed.{SAMPLER})",
    ),
    Case(
        "loader_not_sharded", WRONG, changed(RIGHT, *UNSEEDED), "loader = DataLoader", "rank=weft.dp_rank()",
        Given(ranks=4),
    ),
    Case(
        "loader_not_sharded", WRONG,
        changed(
            COPIES, ("sampler = DistributedSampler(data)\n", ""), ("sampler=sampler", "shuffle=True"),
            ("    sampler.set_epoch(epoch)\n", ""),
        ),
        "loader = DataLoader",
        "DataLoader(data, batch_size=32, sampler=torch.utils.data.distributed.DistributedSampler(data))",
    ),
    Case(
        "sampler_by_rank", WRONG, changed(RIGHT, (SAMPLER, "DistributedSampler(data)")), "sampler = ", SAMPLER,
    ),
    Case(
        "sampler_by_rank", WRONG, changed(RIGHT, ("rank=weft.dp_rank()", "rank=weft.rank()")), "sampler = ", SAMPLER,
    ),
    Case(
        "sampler_without_epoch", WRONG, changed(RIGHT, ("    sampler.set_epoch(epoch)\n", "")), "for epoch in",
        "sampler.set_epoch(epoch)",
    ),
    Case(
        "uneven_last_batch", HINT, changed(RIGHT, (", drop_last=True", "")), "loader = DataLoader",
        "DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)",
    ),
    Case(
        "uneven_last_batch", WRONG,
        changed(RIGHT, *UNSEEDED, (", drop_last=True", ""), ("load()", "TensorDataset(torch.randn(70, 8))")),
        "loader = DataLoader", "drop_last=True", Given(ranks=2),
    ),
    Case(
        "batch_not_divided", WRONG, changed(RIGHT, ("BATCH = 32", "BATCH = 30")), "loader = DataLoader",
        "DataLoader(data, batch_size=28, sampler=sampler, drop_last=True)",
    ),
    Case(
        "batch_not_divided", WRONG, RIGHT, "loader = DataLoader", "batch_size=30", Given(microbatches=5),
    ),
    Case(
        "workers_compete", SLOW, changed(RIGHT, ("drop_last=True", "drop_last=True, num_workers=8")),
        "loader = DataLoader", "num_workers=2", Given(ranks=4, cores=8),
    ),
    Case(
        "seed_by_rank", WRONG, changed(RIGHT, *UNSEEDED, ("manual_seed(0)", "manual_seed(weft.rank())")),
        "torch.manual_seed", "torch.manual_seed(weft.dp_rank())", Given(ranks=2),
    ),
    Case(
        "seed_by_rank", HINT, changed(RIGHT, ("manual_seed(0)", "manual_seed(7 + weft.local_rank())")),
        "torch.manual_seed", "torch.manual_seed(weft.dp_rank())",
    ),
    Case(
        "wrapped_twice", WRONG,
        changed(RIGHT, ("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")),
        "model = nn.parallel", "weft.DistributedModel(model)",
    ),
    Case(
        "wrapped_twice", WRONG, changed(RIGHT, ("DistributedModel(net)", "DistributedModel(nn.DataParallel(net))")),
        "model = ", "weft.DistributedModel(net)",
    ),
    Case(
        "optimizer_before_wrap", WRONG,
        changed(
            RIGHT, ('"partitions": 2', '"sharded_data_parallel_degree": 2'),
            ("model = weft", "plain = torch.optim.Adam(net.parameters())\nmodel = weft"),
        ),
        "plain = ", "torch.optim.Adam(net.parameters())  # after line 15",
    ),
    Case(
        "small_batch_norm", HINT, changed(RIGHT, ("nn.Linear(8, 8)", "nn.BatchNorm1d(8)")), "net = ",
        "model = weft.convert_sync_batchnorm(model)  # before the wrap; or larger microbatches",
    ),
    Case(
        "rate_not_scaled", HINT, changed(COPIES, (" * torch.distributed.get_world_size()", "")), "optimizer = ",
        "torch.optim.SGD(model.parameters(), lr=0.1 * torch.distributed.get_world_size())",
    ),
    Case(
        "rate_not_scaled", HINT, RIGHT, "optimizer = ", "lr=0.1 * weft.dp_size()", Given(ranks=4),
    ),
    Case(
        "spawned_without_guard", WRONG, "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)\n", "mp.spawn",
        'if __name__ == "__main__": mp.spawn(main, nprocs=2)',
    ),
    Case(
        "read_in_step", SLOW, changed(RIGHT, (RETURNED, f"    seen = loss.item()\n{RETURNED}")), "    seen",
        "return loss  # a tensor; read it from what train_step(...) gives",
    ),
    Case(
        "read_in_loop", SLOW, changed(RIGHT, (NOW, f"        losses.append(loss.item())\n{NOW}")),
        "        losses", "losses.append(loss.detach())  # and read it after the loop",
    ),
    Case(
        "read_in_loop", SLOW, changed(COPIES, (STEPPED, f"        print(f'{{loss}} now')\n{STEPPED}")),
        "        print", "if step % 10 == 0: print(f'{loss} now')",
    ),
    Case(
        "read_in_loop", SLOW, changed(COPIES, (STEPPED, f"        print(step, loss)\n{STEPPED}")),
        "        print", "if step % 10 == 0: print(step, loss)",
    ),
    Case(
        "graph_kept", SLOW, changed(COPIES, (STEPPED, f"        total += loss\n{STEPPED}")),
        "        total", "total += loss.detach()",
    ),
    Case(
        "saved_each_step", SLOW, changed(COPIES, (STEPPED, f"{STEPPED}\n        torch.save(step, str(step))")),
        "        torch.save", "if step % 1000 == 0: torch.save(step, str(step))",
    ),
    Case(
        "cache_emptied_each_step", SLOW, changed(COPIES, (STEPPED, f"{STEPPED}\n        torch.cuda.empty_cache()")),
        "        torch.cuda", "# leave out torch.cuda.empty_cache()",
    ),
    Case(
        "refused_in_step", WRONG, changed(RIGHT, ("    return loss", "    optimizer.step()\n    return loss")),
        "    optimizer.step", "train_step(...)  # and in the loop, before or after it: optimizer.step()",
    ),
    Case(
        "refused_in_step", WRONG,
        changed(RIGHT, ("    return loss", "    torch.distributed.all_reduce(loss)\n    return loss")),
        "    torch.distributed", "before or after it: torch.distributed.all_reduce(loss)",
    ),
    Case(
        "together_on_one_rank", WRONG,
        changed(RIGHT, ("state = model.state_dict()\n", ""), ("torch.save(state", "torch.save(model.state_dict()")),
        "    torch.save", "state = model.state_dict()  # before line",
    ),
    Case(
        "together_on_one_rank", WRONG,
        changed(
            RIGHT, ("state = model.state_dict()\n", "def save():\n    if weft.rank() != 0:\n        return\n    "
            'weft.save_checkpoint("out", "last", model=model)\nstate = model.state_dict()\n'),
        ),
        "    weft.save_checkpoint", "weft.save_checkpoint('out', 'last', model=model)  # before line",
    ),
    Case(
        "together_on_one_rank", WRONG, COPIES + "if rank == 0:\n    torch.distributed.all_reduce(loss)\n",
        "    torch.distributed.all", "torch.distributed.all_reduce(loss)  # before line",
    ),
    Case(
        "saved_by_every_rank", WRONG, changed(RIGHT, ("if weft.rank() == 0:\n    torch.save", "torch.save")),
        "torch.save", "state = state\nif weft.rank() == 0:\n    torch.save(state, 'model.pt')",
    ),
    Case(
        "saved_by_every_rank", WRONG, changed(COPIES, ("if rank == 0:\n    torch.save", "torch.save")),
        "torch.save", "if torch.distributed.get_rank() == 0:\n    torch.save(state, 'model.pt')",
    ),
    Case(
        "saved_by_every_rank", WRONG, RIGHT + "torch.save(model.local_state_dict(), 'part.pt')\n",
        "torch.save(model.local", "weft.save(model.local_state_dict(), 'part.pt')  # with the rank in the file's name",
    ),
    Case(
        "fewer_ranks_than_assumed", HINT,
        changed(COPIES, ("sampler = ", "n = torch.distributed.get_world_size()\nbatch = 64 // (n // 8)\nsampler = ")),
        "batch = ", "max(1, n // 8)  # or start 8 ranks",
    ),
    Case(
        "fewer_ranks_than_assumed", WRONG, RIGHT + "batch = 64 // (weft.size() // 8)\n", "batch = ",
        "max(1, weft.size() // 8)", Given(ranks=2),
    ),
    Case(
        "fewer_ranks_than_assumed", WRONG,
        RIGHT + "n = int(os.environ['WORLD_SIZE'])\nhosts = n // 8\nbatch = 64\nbatch //= hosts\n", "hosts = ",
        "max(1, n // 8)", Given(ranks=4),
    ),
    Case(
        "read_in_forward", SLOW,
        FORWARD.replace("HERE", "peak = hidden.abs().max().item()"),
        "        peak", "peak = hidden.abs().max().detach()",
    ),
    Case(
        "read_in_forward", SLOW, FORWARD.replace("HERE", "self.peak = float(hidden)"), "        self.peak",
        "self.peak = hidden.detach()",
    ),
    Case(
        "read_in_forward", SLOW, FORWARD.replace("HERE", "print('hidden', hidden)"), "        print",
        "if not self.training: print('hidden', hidden)",
    ),
    Case(
        "evaluation_with_gradients", SLOW, COPIES + EVALUATION, "    for x, y in test",
        "with torch.no_grad():\n    for x, y in test:",
    ),
    Case(
        "loader_without_workers", HINT, changed(COPIES, (".to(rank)", ".cuda(rank)")), "loader = ",
        "DataLoader(data, batch_size=32, sampler=sampler, num_workers=4)",
    ),
    Case(
        "loader_without_workers", SLOW,
        changed(COPIES, (".to(rank)", ".cuda(rank)"), ("sampler = ", "data = ImageFolder('train')\nsampler = ")),
        "loader = ", "num_workers=2)", Given(ranks=2, cores=6),
    ),
    Case(
        "copy_not_pinned", HINT,
        changed(COPIES, (".to(rank)", ".cuda(rank)"), ("        optimizer.zero", "        x = x.cuda(rank)\n"
            "        optimizer.zero")),
        "loader = ", "pin_memory=True)  # and in line 16 x.cuda(rank, non_blocking=True)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.grade.value}")
def test_the_fault_is_found(case):
    (finding,) = [each for each in found(case.text, case.given) if each.rule == case.rule]
    assert finding.grade is case.grade
    assert case.text.splitlines()[finding.line - 1].startswith(case.line)
    assert case.write in finding.write


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.__name__ for rule in RULES}


def test_the_page_has_each_rule():
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {rule.__name__ for rule in RULES} <= {*rows}


def test_a_quotient_that_is_no_divisor_is_a_hint_and_one_that_cannot_be_0_is_silent():
    guarded = [
        "max(1, weft.size() // 8)",
        "weft.size() // 8 or 1",
        "weft.size() // 8 if weft.size() > 8 else 1",
    ]
    text = RIGHT + "".join(f"batch = 64 // ({each})\n" for each in guarded)
    assert not [each for each in found(text, Given(ranks=2)) if each.rule == "fewer_ranks_than_assumed"]
    (finding,) = [
        each for each in found(RIGHT + "print(weft.size() // 8)\n", Given(ranks=2))
        if each.rule == "fewer_ranks_than_assumed"
    ]  # fmt: skip
    assert finding.grade is HINT


def test_a_job_of_enough_ranks_and_other_sizes_are_silent():
    text = RIGHT + "hosts, rows = weft.size() // 8, BATCH // 64\nx.size() // 8\nbatch_size // 8\n"
    assert not [each for each in found(text, Given(ranks=8)) if each.rule == "fewer_ranks_than_assumed"]
    assert len([each for each in found(text, Given(ranks=4)) if each.rule == "fewer_ranks_than_assumed"]) == 1


@pytest.mark.parametrize("text", [RIGHT, COPIES], ids=["split", "copies"])
@pytest.mark.parametrize("given", [None, Given(ranks=2, cores=4)], ids=["alone", "given"])
def test_nothing_is_found_where_nothing_is_wrong(text, given):
    assert found(text, given) == []


@pytest.mark.parametrize(
    "name", ["import weft.torch as smp", "import smdistributed.modelparallel.torch as smp"]
)
def test_weft_is_known_by_its_other_names(name):
    text = changed(RIGHT, ("weft.", "smp."), ("import smp.torch as weft", name))
    assert found(text) == []
    assert [each.rule for each in found(changed(text, ("BATCH = 32", "BATCH = 30")))] == ["batch_not_divided"]
    own = SAMPLER.replace("weft", "smp")
    assert [each.write for each in found(changed(text, (own, "DistributedSampler(data)")))] == [own]


LAST = 'if weft.rank() == 0:\n    torch.save(state, "model.pt")'
OWN_DATA = [("sampler=sampler", "shuffle=True"), ("    sampler.set_epoch(epoch)\n", "")]
SILENT = {
    "a value that no tensor holds": FORWARD.replace("HERE", "scale = float(self.scale)"),
    "a read now and then": FORWARD.replace("HERE", "if self.steps % 100 == 0: print(hidden)"),
    "a read in evaluation": FORWARD.replace("HERE", "if not self.training: self.peak = hidden.max().item()"),
    "lengths that have to be on the host": FORWARD.replace(
        "HERE", "pack_padded_sequence(hidden, lengths.cpu())"
    ),
    "a shape": FORWARD.replace("HERE", "print(hidden.shape)"),
    "a function of another class": FORWARD.replace("torch.nn.Module", "Layer").replace(
        "HERE", "x = x.item()"
    ),
    "a generation": FORWARD.replace("    def", "    @torch.no_grad()\n    def").replace(
        "HERE", "x = hidden.item()"
    ),
    "a context": COPIES
    + EVALUATION.replace("    for x", "    with torch.no_grad():\n     for x").replace("      ", "       "),
    "a context around the call": COPIES
    + EVALUATION.replace("\nevaluate(", "\nwith torch.inference_mode():\n    evaluate("),
    "a decorator of the evaluation": COPIES + EVALUATION.replace("def ", "@torch.no_grad()\ndef "),
    "a model without gradients": COPIES
    + EVALUATION.replace("net.eval()", "net.eval().requires_grad_(False)"),
    "gradients that are wanted": COPIES
    + EVALUATION.replace("    return", "    torch.autograd.grad(total, x)\n    return"),
    "trained again": COPIES + EVALUATION.replace("total = 0.0", "net.train()"),
    "samples in memory": changed(
        COPIES, (".to(rank)", ".cuda()"), ("sampler = ", "data = TensorDataset(a, b)\nsampler = ")
    ),
    "workers": changed(COPIES, (".to(rank)", ".cuda()"), ("sampler=s", "num_workers=0, sampler=s")),
    "a loader's own arguments": changed(
        COPIES, (".to(rank)", ".cuda()"), ("sampler=s", "**options, sampler=s")
    ),
    "no GPU": changed(COPIES, ("        optimizer.zero", "        x = x.to(device)\n        optimizer.zero")),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_does_not_hurt_is_not_found(name):
    new = {"read_in_forward", "evaluation_with_gradients", "loader_without_workers", "copy_not_pinned"}
    assert [each for each in found(SILENT[name]) if each.rule in new] == []


UNSURE = {
    "a rank that is the copy's": changed(
        RIGHT, ("sampler = ", "rank = weft.dp_rank()\nsampler = "), ("rank=weft.dp_rank()", "rank=rank")
    ),
    "a file for each rank": changed(
        RIGHT, (LAST, 'torch.save(model.local_state_dict(), f"{weft.rank()}.pt")')
    ),
    "either wrapper": changed(
        RIGHT,
        ("model = weft", "if copies:\n    model = nn.DataParallel(net)\nelse:\n    model = weft"),
    ),
    "every rank, or one": changed(RIGHT, ("state =", "if weft.rank() == 0 or everywhere:\n    state =")),
    "whether there are ranks": changed(RIGHT, ("state =", "if local_rank != -1:\n    state =")),
    "one rank of each copy": changed(RIGHT, ("state =", "if weft.rdp_rank() == 0:\n    state =")),
    "one after the other": COPIES + "if rank == 0:\n    torch.distributed.barrier()\n",
    "both branches": COPIES
    + "if rank == 0:\n    torch.distributed.reduce(x, 0)\nelse:\n    torch.distributed.reduce(x, 0)\n",
    "uneven batches": changed(
        RIGHT, ("@weft.step", "@weft.step(allow_uneven=True)"), ("BATCH = 32", "BATCH = 30")
    ),
    "a batch that is not written down": changed(RIGHT, ("BATCH = 32", "BATCH = int(input())")),
    "a dataset with its own part": changed(
        COPIES, ("sampler = DistributedSampler(data)\n", "data = Rows(rank)\n"), *OWN_DATA
    ),
    "a file of its own": changed(
        COPIES, ("sampler = DistributedSampler(data)\n", "data = read(f'rows-{rank}.pt')\n"), *OWN_DATA
    ),
    "values that are read now and then": changed(
        COPIES, (STEPPED, f"        if n % 9 == 0:\n            print(loss.item())\n{STEPPED}")
    ),
    "the others have gone": changed(
        COPIES, ("if rank == 0:\n    torch.save", "if rank != 0:\n    sys.exit(0)\ntorch.save")
    ),
    "a decorator": changed(
        COPIES, ("if rank == 0:\n    torch.save", "@rank_zero_only\ndef main():\n    torch.save")
    ),
    "a guarded main": "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(main)\n",
    "a fork": "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2, start_method='fork')\n",
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_may_be_right_is_not_wrong(name):
    assert [each for each in found(UNSURE[name]) if each.grade is not Grade.HINT] == []


def test_in_a_script_for_one_process_nothing_is_wrong_yet():
    text = changed(
        COPIES, ("DDP(nn.Linear(8, 1).to(rank), device_ids=[rank])", "nn.Linear(8, 1)"),
        ("    sampler.set_epoch(epoch)\n", ""),
    )  # fmt: skip
    assert {(each.rule, each.grade) for each in found(text)} == {("sampler_without_epoch", Grade.HINT)}


def test_a_step_may_be_a_method():
    step = RIGHT[RIGHT.index("@weft.step") : RIGHT.index("for epoch")]
    inside = "class Trainer:\n" + "".join(f"    {line}\n" for line in step.strip().splitlines())
    inside += "    def fit(self):\n        for x, y in loader:\n            self.train_step(model, x, y)\n"
    text = changed(RIGHT[: RIGHT.index("for epoch")], (step, inside), ("BATCH = 32", "BATCH = 30"))
    assert [each.rule for each in found(text)] == ["batch_not_divided"]


def test_a_rank_is_followed_into_functions_and_methods():
    started = """
def train(rank, world_size):
    setup(rank, world_size)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = DDP(net.to(rank), device_ids=[rank])
    for epoch in range(10):
        for x, y in loader:
            model(x).mean().backward()
        torch.save(model.module.state_dict(), f"epoch{epoch}.pt")

def setup(rank, world_size):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""
    head = COPIES[: COPIES.index("torch.distributed.init")]
    assert {each.rule for each in found(head + started)} == {"loader_not_sharded", "saved_by_every_rank"}
    assert found(changed(head + started, ("data,", "part(rank),"), (".pt", "-{rank}.pt"))) == []

    saving = """
class Trainer:
    def __init__(self):
        self.model = weft.DistributedModel(net)

    def fit(self):
        if weft.rank() == 0:
            self.save()

    def save(self):
        torch.save(self.model.state_dict(), "self.pt")
"""
    (finding,) = found(RIGHT + saving)
    assert (finding.rule, finding.grade) == ("together_on_one_rank", Grade.WRONG)
    assert found(RIGHT + changed(saving, ("if weft.rank() == 0", "if weft.rdp_rank() == 0"))) == []


def test_a_loader_is_followed_into_a_function():
    body = RIGHT[RIGHT.index("for epoch") : RIGHT.index("state =")]
    text = changed(
        RIGHT,
        (body, "def train(batches):\n    for x, y in batches:\n        train_step(model, x, y)\ntrain(loader)\n"),
        ("BATCH = 32", "BATCH = 30"),
    )  # fmt: skip
    assert [each.rule for each in found(text)] == ["batch_not_divided"]
