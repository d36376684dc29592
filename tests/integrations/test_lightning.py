"""Lightning's Trainer with a split model gives what it gives in one process; what it cannot do is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_ranks

pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

JOB = Path(__file__).parent / "jobs" / "lightning_job.py"
REFUSED = Path(__file__).parent / "jobs" / "lightning_refused.py"
QUIET = {"PYTHONWARNINGS": "ignore"}
CASES = ("fitting", "resuming", "manual", "mixed", "joined", "padded", "replicas")
BF16_ROUNDING = 0.02


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process gives."""
    folder = tmp_path_factory.mktemp("lightning")
    run_ranks(1, JOB, [str(folder), "0", *CASES], warm=True, env=QUIET).check()
    return folder


@pytest.fixture(scope="module")
def split(plain: Path) -> Path:
    """What two ranks with a part of the model each give."""
    run_ranks(2, JOB, [str(plain), "2", *CASES[:-1]], warm=True, env=QUIET).check()
    return plain


def found(folder: Path, which: str, case: str) -> Any:
    return json.loads((folder / f"{which}.json").read_text())[case]


def same(one: Any, other: Any, within: float = 1e-5) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name], within)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs, within)
    else:
        assert one == (pytest.approx(other, rel=within, abs=within) if isinstance(one, float) else other)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES[:-1])
def test_as_in_one_process(case: str, rank: int, split: Path):
    within = BF16_ROUNDING if case == "mixed" else 1e-5
    same(found(split, f"weft/{rank}", case), found(split, "plain/0", case), within)


def test_the_cases_are_what_they_say(split: Path):
    case = found(split, "plain/0", "fitting")
    assert {"on_before_zero_grad with", "on_after_backward with"} <= set(case["hooks"])
    assert len(case["losses"]) > 6 and case["steps"] < len(case["losses"])
    assert {"lr-AdamW", "loss_step", "loss_epoch", "accuracy", "rows"} <= case["metrics"].keys()
    assert case["metrics"]["seen"] == 22
    assert len(case["files"]) == 2 and case["best"] in case["files"]


def test_loggers_write_once_and_the_same(split: Path):
    logs = [(split / which / "fitting/logs/one/metrics.csv").read_text() for which in ("plain", "weft")]
    rows = [[line.split(",") for line in text.splitlines()] for text in logs]
    assert [len(table) for table in rows][0] == len(rows[1])
    assert rows[0][0] == rows[1][0]
    for mine, theirs in zip(rows[0][1:], rows[1][1:], strict=True):
        same([float(cell or 0) for cell in mine], [float(cell or 0) for cell in theirs])


def test_checkpoints_are_plain_lightning_ones(split: Path):
    """Every file that was written has the names, shapes and values of one process's, and loads without weft."""
    script = f"""
import sys
sys.modules["weft"] = None
sys.argv = ["job", {str(split)!r}, "0"]
sys.path.insert(0, {str(JOB.parent)!r})
import torch
from lightning_job import Classifier
from pathlib import Path

def flat(thing, path=""):
    if isinstance(thing, dict):
        return [found for name, each in thing.items() for found in flat(each, f"{{path}}/{{name}}")]
    if isinstance(thing, (list, tuple)):
        return [found for number, each in enumerate(thing) for found in flat(each, f"{{path}}/{{number}}")]
    return [(path, thing)]

folder = Path({str(split)!r})
plain = sorted((folder / "plain/fitting").glob("*.ckpt"))
for one in plain:
    module = Classifier.load_from_checkpoint(folder / "weft/fitting" / one.name, weights_only=False)
    contents = [torch.load(folder / which / "fitting" / one.name, weights_only=False) for which in ("plain", "weft")]
    for content in contents:
        content.pop("callbacks")
    mine, other = map(flat, contents)
    assert [name for name, _ in mine] == [name for name, _ in other]
    for (name, value), (_, theirs) in zip(mine, other):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs, value, rtol=1e-4, atol=1e-5, msg=name)
    for name, value in module.state_dict().items():
        assert torch.equal(value, contents[1]["state_dict"][name])
print(len(plain), "the same")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 the same"


def test_copies_of_a_split_model_log_and_learn_together(plain: Path):
    run_ranks(4, JOB, [str(plain), "2", "replicas"], warm=True, env=QUIET).check()
    expected = found(plain, "plain/0", "replicas")
    expected["metrics"].pop("accuracy_of_batch")  # a mean of the copies' own: that of recalls is none
    for rank in range(4):
        mine = found(plain, f"weft/{rank}", "replicas")
        mine["metrics"].pop("accuracy_of_batch")
        same(mine, expected)


def test_ranks_that_split_tensors_are_one_copy(plain: Path):
    settings = {"SETTINGS": json.dumps({"tensor_parallel_degree": 2})}
    run_ranks(4, JOB, [str(plain), "1", "replicas"], warm=True, env=QUIET | settings).check()
    expected = found(plain, "plain/0", "replicas")
    expected["metrics"].pop("accuracy_of_batch")
    for rank in range(4):
        mine = found(plain, f"weft/{rank}", "replicas")
        mine["metrics"].pop("accuracy_of_batch")
        same(mine, expected)


def test_torchrun_starts_it_too(plain: Path):
    run_ranks(2, JOB, [str(plain), "2", "manual"], launcher="torchrun", env=QUIET).check()
    same(found(plain, "weft/1", "manual"), found(plain, "plain/0", "manual"))


def test_several_updates_in_a_step_where_nothing_is_split(plain: Path):
    """Generator and discriminator, by copies that each read a half."""
    run_ranks(1, JOB, [str(plain), "0", "adversarial"], warm=True, env=QUIET).check()
    run_ranks(2, JOB, [str(plain), "1", "adversarial"], warm=True, env=QUIET).check()
    for rank in range(2):
        same(found(plain, f"weft/{rank}", "adversarial"), found(plain, "plain/0", "adversarial"))


def test_pytorch_lightning_is_taken_where_the_script_uses_it():
    pytest.importorskip("pytorch_lightning")
    script = (
        "import pytorch_lightning, weft.integrations.lightning as found\nprint(found.WeftStrategy.__mro__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    assert "<class 'pytorch_lightning.strategies.parallel.ParallelStrategy'>" in done.stdout


SMDDP = """
import os
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
import smdistributed.dataparallel.torch.torch_smddp

from pytorch_lightning.plugins.environments.lightning_environment import LightningEnvironment as Former
assert Former.__name__ == "LightningEnvironment"
env = LightningEnvironment()
env.world_size = lambda: int(os.environ["WORLD_SIZE"])
env.global_rank = lambda: int(os.environ["RANK"])

class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = self.linear(batch).square().mean()
        if self._trainer is not None:  # counts samples, as integers, whose mean ranks take
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=4)

strategy = DDPStrategy(cluster_environment=env, process_group_backend="smddp", accelerator="gpu")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
assert Trainer(accelerator="gpu", devices=-1, **quiet).num_devices == 2
gloo = FabricStrategy(process_group_backend="gloo")
assert Fabric(accelerator="cuda", strategy=gloo, devices=[0, 1]).world_size == 2
trainer = Trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), max_epochs=2, **quiet)
assert trainer.world_size == 2
model = Plain()
trainer.fit(model)
alone, data = Plain(), torch.arange(32.0).reshape(8, 4) / 32
optimizer = alone.configure_optimizers()
for _ in range(2):
    optimizer.zero_grad()
    alone.training_step(data, 0).backward()
    optimizer.step()
torch.testing.assert_close(model.linear.weight, alone.linear.weight)
print("passed", flush=True)
"""


def test_scripts_with_smddp_and_gpus_train_on_cpus():
    done = run_ranks(2, SMDDP, env=QUIET, options=["--device", "cpu", "--smdistributed"])
    assert done.check().stdout.count("passed") == 2


def test_where_lightning_is_missing():
    script = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
import weft.integrations.lightning
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "weft.integrations.lightning needs Lightning: pip install lightning" in done.stderr


REASONS = {
    "precision": "WeftStrategy cannot train with precision='64-true': choose one of 32-true, bf16-mixed",
    "lbfgs": "LBFGS looks at all parameters at once",
    "backward": "Plain.backward() is overridden, but a split model's backward pass is weft's",
    "nothing": "Plain.training_step returned None: with a split model every batch has one",
    "logger": "self.logger was used in Plain.training_step, which runs once for each microbatch",
    "compute": "MeanMetric.compute() was called in Plain.training_step, which runs once for each microbatch",
    "value": "the value of MeanMetric.forward() for a batch is known after its step only",
    "twice": "training_step goes backward again after SGD.step(), but the microbatches of a split model",
    "closure": "SGD.step(closure) would compute in an update",
    "toggle": "self.toggle_optimizer() was used in Plain.training_step",
    "sometimes": "Plain.training_step: some microbatches logged or called rare",
    "batches": "The ranks of one pipeline must read the same batches",
    "texts": "Plain.training_step gets a list of 4 items that are no tensors, batch[1]",
    "object": "Plain.training_step gets a Own without tensors that weft could cut",
    "iterator": "Plain.training_step gets a",
    "processes": "2 processes cannot be divided into pipelines of 3 partitions",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_honoured_is_refused_by_name(case: str, tmp_path: Path):
    done = run_ranks(2, REFUSED, [case], warm=True, env=QUIET)
    assert done.returncode == 1 and REASONS[case] in done.stderr, done.stderr
