"""`weft rehearse` says of a script what a run of two processes plans, and needs no memory for weights."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, SOURCE, run_ranks
from tests.long import one_day_in, one_in
from tests.parity.tensor_parallel_models import WIDTH

SCRIPT = Path(__file__).with_name("rehearsed.py")
PATHS = {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
CASES = ["perceptron", "blocks", "recurrent", "blocks autocast", "blocks checkpointed", "blocks frozen", "tied",
         "mixture"]  # fmt: skip


def rehearse(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "rehearse", "--json", str(folder / "answer.json"), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **PATHS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def answered(arguments: list[str], folder: Path) -> dict[str, Any]:
    done = rehearse(arguments, folder)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    assert answer["fits"] == (done.returncode == 0)
    return answer


@pytest.mark.parametrize("case", one_in(3, CASES))
def test_sizes_are_those_of_a_real_job(case: str, tmp_path: Path) -> None:
    job = run_ranks(2, SCRIPT, case.split(), env=PATHS)
    job.check()
    real = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("REAL"))[5:])
    answer = answered(["-n", "2", "--device", "T4", str(SCRIPT), *case.split()], tmp_path)
    for at, part in enumerate(answer["parts"]):
        units = [name for name, where in real["units"] if where == at]
        assert part["units"] == [units[0], units[-1], len(units)]
        assert part["weights"] == real["weights"][at]
        assert part["gradients"] == real["trained"][at]
        assert part["states"] == pytest.approx(real["states"][at], rel=0.01, abs=200)  # counters of steps
        assert part["activations"] == pytest.approx(real["memory"][at] - 4 * real["weights"][at], rel=0.06)


def test_what_waits_in_host_memory_is_counted_there(tmp_path: Path) -> None:
    asked = ["-n", "2", "--device", "T4", str(SCRIPT), "perceptron"]
    whole = answered(asked, tmp_path)["parts"]
    settings = ["--set", "offload_optimizer=true", "--set", "offload_activations=true"]
    offloaded = answered([*settings, *asked], tmp_path)["parts"]
    for one, other in zip(whole, offloaded, strict=True):
        assert other["weights"] == one["weights"] and other["total"] <= one["total"]
        moved = one["states"] + one["activations"] - other["states"] - other["activations"]
        assert other["host"] == pytest.approx(moved)
    assert offloaded[0]["host"] > 0


LAYERS = """
import torch
import weft.torch as weft
weft.init(partitions=2, microbatches=2)
with weft.delay_param_initialization():
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16))).requires_grad_(False)
    model = weft.DistributedModel(torch.nn.Sequential(*net, torch.nn.Linear(512, 2)))

@weft.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(2):
    step(model, torch.randn(4, 512))
"""


def test_layers_that_wait_in_host_memory_are_counted_there(tmp_path: Path) -> None:
    script, layer = tmp_path / "layers.py", 2**20
    script.write_text(LAYERS)
    asked = ["-n", "2", "--device", "T4", str(script)]
    whole = answered(asked, tmp_path)["parts"]
    away = answered(["--set", "offload_weights=true", *asked], tmp_path)["parts"]
    assert sum(part["host"] for part in away) == 16 * layer
    for one, other in zip(whole, away, strict=True):
        assert one["weights"] - other["weights"] == one["may_wait"] == other["host"] - 4 * layer


EXPERTS = """
import torch
from tests.parity.expert_parallel import ToAll
import weft.torch as weft
weft.init(microbatches=2, expert_parallel_degree=4)
model = weft.DistributedModel(torch.nn.Sequential(ToAll(), ToAll()))
optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))

@weft.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

step(model, torch.randn(8, 5, 32))
optimizer.step()
"""


def test_replicas_that_share_experts_have_their_part(tmp_path: Path) -> None:
    script = tmp_path / "experts.py"
    script.write_text(EXPERTS)
    (part,) = answered(["-n", "4", "--device", "T4", str(script)], tmp_path)["parts"]
    routers, experts = 2 * (4 * WIDTH + 4), 2 * 2 * 4 * WIDTH * 40
    assert part["weights"] == part["gradients"] == 4 * (routers + experts / 4)


LARGE = """
import torch
from torch import nn
import weft.torch as weft
weft.init(partitions=4, microbatches=4, pipeline="gpipe", **SETTINGS)
net = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)) for _ in range(16)))
model = weft.DistributedModel(net.to(torch.bfloat16).cuda())
optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))

@weft.step
def step(model, x):
    loss = model(x).float().square().mean()
    model.backward(loss)
    return loss

for number in range(3):
    loss = step(model, torch.randn(64, 8192, dtype=torch.bfloat16).to("cuda", non_blocking=True))
    print("loss", float(loss.reduce_mean()))
    optimizer.step()
    optimizer.zero_grad()
    weft.save_checkpoint("saves", f"s{number}", model=model, optimizer=optimizer)
"""


@pytest.mark.parametrize(("device", "settings", "fits"), [("H100", {}, True), ("T4", {}, False)])
def test_large_models_need_no_memory(
    device: str, settings: dict[str, Any], fits: bool, tmp_path: Path
) -> None:
    """17 GB of weights in bfloat16, and three times as much beside them."""
    script = tmp_path / "large.py"
    script.write_text(LARGE.replace("SETTINGS", repr(settings)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    answer = answered(["-n", "8", "--device", device, str(script)], tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after == before or after < 3 * 2**20, "KiB"
    assert not (tmp_path / "saves").exists()
    assert answer["fits"] == fits
    one = 4 * (2 * 8192 * 32768 + 32768 + 8192) * 2
    assert [part["weights"] for part in answer["parts"]] == [one] * 4
    assert answer["parts"][0]["states"] == pytest.approx(2 * one, rel=1e-3)


def test_ranks_that_share_weights_have_their_part(tmp_path: Path) -> None:
    job = run_ranks(4, SCRIPT, ["blocks"], env={**PATHS, "WEFT_SET": '{"tensor_parallel_degree": 2}'})
    job.check()
    real = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("REAL"))[5:])
    given = ["-n", "4", "--device", "T4", str(SCRIPT), "blocks"]
    whole, part = answered(given, tmp_path), answered(["--tensor_parallel_degree", "2", *given], tmp_path)
    assert sum(part["parts"][at]["weights"] for at in (0, 1)) == sum(real["held"]) / 2
    for one, other in zip(whole["parts"], part["parts"], strict=True):
        assert other["weights"] < one["weights"] and other["activations"] < one["activations"]


WRONG = {
    "-n 3": "3 processes cannot be divided into pipelines of 2 partitions",
    "--cluster 1x2xT4 -n 4": "1x2xT4 has 2 devices for 4 ranks",
    "--device GTX": 'there is no accelerator "GTX"',
    "--microbatches 3 -n 2": "3 microbatches",
    "-n 2 MISSING": 'there is no file "missing.py"',
    "-n 2 READS": "the step cannot be traced without data",
    "-n 2 ENDS": "the script ended before its first step",
    "-n 2 OTHER": "weft rehearse is for PyTorch",
    "-n 2 DDP": "this one uses DistributedDataParallel",
}
READS = """
import torch
import weft.torch as weft
weft.init(partitions=2)
model = weft.DistributedModel(torch.nn.Linear(200, 200))
@weft.step
def step(x):
    loss = model(x).sum()
    print(loss.item())
    model.backward(loss)
step(torch.ones(2, 200))
"""
DDP = """
import torch
import weft.torch as weft
weft.init()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
"""
OTHER = "import weft.tensorflow as weft\nweft.init(partitions=2)\n"
ENDS = "import weft.torch as weft\nweft.init(partitions=2)\n"
SCRIPTS = {"MISSING": None, "READS": READS, "ENDS": ENDS, "DDP": DDP, "OTHER": OTHER}


@pytest.mark.parametrize("arguments", one_in(3, list(WRONG)))
def test_mistakes_are_told_in_words(arguments: str, tmp_path: Path) -> None:
    if "OTHER" in arguments:
        pytest.importorskip("tensorflow")
    given = arguments.split()
    script, *name = [str(SCRIPT), "perceptron"]
    if given[-1] in SCRIPTS:
        script, name = f"{given.pop().lower()}.py", []
        text = SCRIPTS[arguments.split()[-1]]
        if text is not None:
            (tmp_path / script).write_text(text)
    if not {"--device", "--cluster"} & set(given):
        given += ["--device", "T4"]
    done = rehearse([*given, script, *name], tmp_path)
    assert done.returncode not in (0, 3), done.stdout
    assert WRONG[arguments] in done.stderr, done.stderr
    assert "src/weft" not in done.stderr or "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "answer.json").exists()


EXAMPLES = [
    f"examples/{name}.py"
    for name in (
        "evaluate_classifier", "gpt_demo", "train_and_resume", "train_experts", "train_gan", "train_gpt",
        "train_hybrid", "train_lightning", "train_mlp_manual", "train_trainer",
    )
] + [
    f"tests/scripts/{name}"
    for name in (
        "habits_smp.py 2 .", "mnist_smp.py", "train_gpt_neox.py", "train_gpt_sdp.py", "train_gpt_tp.py", "train_t5.py",
        "gpt2/train_gpt_simple.py", "gptj/train_gptj.py", "vit_trainer.py",
    )
]  # fmt: skip
"""Scripts that the suite runs; those of `tests/scripts` are written for smdistributed."""


@pytest.mark.parametrize("script", one_in(5, EXAMPLES))
def test_scripts_that_run_are_rehearsed(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SM_CHANNEL_TRAINING", "SM_CHANNEL_TRAIN", "SM_CHANNEL_TEST"):
        monkeypatch.setenv(name, str(tmp_path))
    path, *arguments = script.split()
    options = ["--smdistributed"] if path.startswith("tests") else []
    answer = answered(
        ["-n", "4", "--device", "A100-40", "--partitions", "2", *options, str(ROOT / path), *arguments],
        tmp_path,
    )
    assert answer["trains"] and len(answer["parts"]) == 2
    assert all(part["weights"] and part["gradients"] and part["activations"] for part in answer["parts"])


@one_day_in(2)
def test_unlike_ranks_are_rehearsed_as_they_run(tmp_path: Path) -> None:
    settings = {"WEFT_SET": '{"devices": "1, 0.25", "memory_weight": 0}'}
    job = run_ranks(2, SCRIPT, ["blocks"], env={**PATHS, **settings})
    job.check()
    real = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("REAL"))[5:])
    assert real["weights"][0] > 2 * real["weights"][1] > 0
    answer = answered(
        ["-n", "2", "--device", "T4", "--devices", "1, 0.25", "--memory_weight", "0", str(SCRIPT), "blocks"],
        tmp_path,
    )
    assert answer["parts"][0]["weights"] > 2 * answer["parts"][1]["weights"] > 0
