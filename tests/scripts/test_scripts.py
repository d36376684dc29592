"""Scripts as practitioners of 2021 to 2023 wrote them for smdistributed run unchanged, with one process's losses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.launching import Completed, run_ranks
from tests.long import one_day_in

HERE = Path(__file__).parent
LOSS = re.compile(r"loss\s*[:=]?\s*(\d+\.\d+)", re.IGNORECASE)
QUIET = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}


def run(n: int, script: str | Path, *args: object, warm: bool = True, options=(), **env: object) -> Completed:
    """The script, under `weft run --device cpu --smdistributed`, to its end."""
    return run_ranks(
        n,
        script if "\n" in str(script) else HERE / script,
        [str(arg) for arg in args],
        {**QUIET, **{name: str(value) for name, value in env.items()}},
        timeout=300,
        options=["--device", "cpu", "--smdistributed", *options],
        warm=warm,
    )


def losses(done: Completed) -> list[float]:
    """Those that the first rank's log tells."""
    lines = [line for line in done.check().stdout.splitlines() if not line.startswith("[rank")]
    found = [float(text) for line in lines for text in LOSS.findall(line)]
    assert found, done.stdout
    return found


def close(one: list[float], other: list[float], tolerance: float = 1e-4) -> bool:
    return one == pytest.approx(other, rel=tolerance, abs=2e-6)


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """Folders of the job; no script makes these."""
    made = {
        name: tmp_path / name.lower() for name in ("SM_CHANNEL_TRAINING", "SM_CHANNEL_TRAIN", "SM_MODEL_DIR")
    }
    for path in made.values():
        path.mkdir()
    return made


def told(partitions: int) -> str:
    return json.dumps({"partitions": partitions, "microbatches": 2, "ddp": True})


def test_digits_cut_by_hand(folders, tmp_path):
    alone = losses(run(1, "mnist_smp.py", **folders, SM_HP_MP_PARAMETERS=told(1)))
    two = {**folders, "SM_HP_MP_PARAMETERS": told(2)}
    assert close(losses(run(2, "mnist_smp.py", **two)), alone)
    assert close(losses(run(4, "mnist_smp.py", **two)), alone, 2e-2), "BatchNorm sees fewer samples"
    saved = ("--ckpt-dir", tmp_path)
    half = losses(
        run(2, "mnist_smp.py", "--amp", 1, "--save-partial-model", "--save-full-model", *saved, **two)
    )
    assert close(half, alone, 1e-2)
    assert (folders["SM_MODEL_DIR"] / "model.pth").exists()
    resumed = losses(run(2, "mnist_smp.py", "--amp", 1, "--load-partial-model", *saved, **two))
    assert resumed == half[len(half) // 2 :]


GPT2 = "gpt2/train_gpt_simple.py"
SPLIT = ("--pipeline_parallel_degree", 2, "--microbatches", 2)


@one_day_in(3)
def test_gpt2_with_data_on_the_first_rank_of_a_pipeline(folders, tmp_path):
    alone = losses(run(1, GPT2, "--validation_freq", 3, **folders))
    watched = ("--validation_freq", 3, "--enable_memory_profiling", 1, "--logits_output", 1)
    assert close(losses(run(2, GPT2, *SPLIT, *watched, **folders)), alone)
    kept = ("--checkpoint-dir", tmp_path / "kept", "--manual_partition", 1)
    whole = ("--save_final_full_model", 1, "--shard_optimizer_state", 1)
    trained = losses(run(2, GPT2, *SPLIT, *kept, *whole, **folders))
    four = (*SPLIT, *kept, "--load_partial", 1, "--train_batch_size", 2, "--delayed_param", 1)
    (tmp_path / "kept" / "newest").write_text(
        next(path.name for path in (tmp_path / "kept").glob("*steps-3_partial")).removesuffix("_partial")
    )
    assert close(losses(run(4, GPT2, *four, "--offload_activations", 1, **folders)), trained[3:])
    again = losses(run(1, GPT2, "--load_full", 1, "--max_steps", 1, **folders))
    assert again[0] < trained[-1], "the full model was not taken up"


@one_day_in(3)
def test_gptj_with_a_trainer_of_its_own(tmp_path):
    script, kept = "gptj/train_gptj.py", ("--checkpoint_dir", tmp_path)
    alone = losses(run(1, script, *kept, "--tag", "one", SM_HP_PIPELINE_PARALLEL_DEGREE=1))
    assert close(losses(run(2, script, *kept)), alone)
    resumed = losses(run(4, script, *kept, "--resume", "--per_device_train_batch_size", 4))
    assert close(resumed, alone[3:])
    assert close(losses(run(2, script, *kept, "--tag", "half", "--fp16")), alone, 5e-3)


@one_day_in(3)
def test_gpt_neox_logs_by_logging(tmp_path):
    alone = losses(run(1, "train_gpt_neox.py"))
    more = ("--pipeline_parallel_degree", 2, "--ckpt_layers", 1, "--workers", 1, "--model_dir", tmp_path)
    *split, reloaded = losses(run(2, "train_gpt_neox.py", *more))
    assert close(split, alone) and close([reloaded], alone[-1:])
    four = ("--pipeline_parallel_degree", 2, "--train_batch_size", 4, "--shard_optimizer_state", 1)
    assert close(losses(run(4, "train_gpt_neox.py", *four)), alone)
    twice = ("--gradient_accumulation", 2, "--train_batch_size", 4)
    accumulated = losses(run(1, "train_gpt_neox.py", *twice))
    split = ("--pipeline_parallel_degree", 2, "--schedule", "simple")
    assert close(losses(run(2, "train_gpt_neox.py", *twice, *split)), accumulated)


def test_gpt_with_tensor_parallelism(tmp_path):
    script, kept = "train_gpt_tp.py", ("--model_dir", tmp_path)
    one = run(1, script, *kept)
    alone = losses(one)
    two = run(2, script, "--tensor_parallel_degree", 2, *kept)
    assert close(losses(two), alone)
    norms = [[float(text) for text in re.findall(r"norm: (\S+)", done.stdout)] for done in (one, two)]
    assert len(norms[0]) == 4 and close(norms[1], norms[0], 1e-3), (
        "the script's own, of the parts that ranks hold"
    )
    apart = ("--prescaled_batch", 0, "--train_batch_size", 4, *kept)
    assert close(losses(run(2, script, "--tensor_parallel_degree", 2, *apart)), alone)
    saved = torch.load(tmp_path / "hf.pt", weights_only=True)
    shape = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(shape).eval()
    theirs.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    again = losses(run(1, script, *kept, "--load", tmp_path / "hf.pt"))
    torch.manual_seed(12345)
    ids = torch.randint(64, (8, 16))
    loss = sum(theirs(half, labels=half).loss for half in ids.chunk(2)) / 2
    assert again[0] == pytest.approx(loss.item(), abs=1e-5)


def test_layers_that_are_replaced_under_tensor_parallelism():
    script, split = "train_gpt_tp.py", ("--own_layers", 1, "--tensor_parallel_degree", 2)
    two = run(2, script, *split).check()
    four = run(4, script, *split, "--pipeline_parallel_degree", 2).check()
    assert close(losses(two), losses(four)) and losses(two)[-1] < losses(two)[0]
    assert "layers: replaced" in two.stdout and "layers: replaced" in four.stdout
    assert "layers: own" in run(1, script, "--own_layers", 1).check().stdout


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_t5_with_its_shared_embedding(folders, tmp_path, optimizer):
    options = ("--optim", optimizer)
    alone = losses(run(1, "train_t5.py", *options, "--partitions", 1, SM_OUTPUT_DATA_DIR=tmp_path, **folders))
    assert close(losses(run(2, "train_t5.py", *options, SM_OUTPUT_DATA_DIR=tmp_path, **folders)), alone)
    assert (tmp_path / "eval_results.txt").exists()


@one_day_in(3)
def test_sharded_data_parallelism_saves_and_resumes(tmp_path):
    script, kept = "train_gpt_sdp.py", ("--checkpoint-dir", tmp_path)
    one = ("--sharded_data_parallel_degree", 1, "--train_batch_size", 8)
    alone = losses(run(1, script, *one))
    shared = losses(run(2, script, *kept))
    assert close(shared, alone)
    assert close(losses(run(2, script, *kept, "--load_partial", 1)), alone[3:])
    assert close(losses(run(4, script, "--train_batch_size", 2, "--bf16", 1)), alone, 1e-2)


def test_bert_with_data_parallelism_of_the_older_style(folders):
    script = "bert_pretraining_dp.py"
    alone = losses(run(1, script, **folders))
    two = losses(run(2, script, **folders))
    assert close(two, alone)
    resumed = losses(run(2, script, "--resume_from_checkpoint", "--resume_step", 2, **folders))
    assert close(resumed, two[2:])


def test_the_first_rank_evaluates_alone(folders):
    """Buffers are those that PyTorch shows, and a rank that evaluates waits for nobody."""
    script = "imagenet_resnet_dp.py"
    plain = losses(run(2, script, "--all-evaluate", "--dist-backend", "nccl", **folders))
    assert losses(run(2, script, warm=False, **folders)) == plain
    resumed = ("--resume", folders["SM_MODEL_DIR"] / "checkpoint.pth.tar", "--epochs", 3)
    assert losses(run(2, script, *resumed, **folders))
    every = run(2, script, "--all-evaluate", **folders).check()
    assert {line.partition("Val")[2] for line in every.stdout.splitlines() if " rank 0 Val" in line} == {
        line.partition("Val")[2] for line in every.stdout.splitlines() if " rank 1 Val" in line
    }
    assert close(losses(run(2, script, "--amp", "--channels-last", **folders)), plain, 2e-2)


def test_batch_norm_over_all_processes(folders):
    alone = losses(run(1, "imagenet_resnet_dp.py", **folders))
    assert close(losses(run(2, "imagenet_resnet_dp.py", "--sync_bn", **folders)), alone)


HALVES = """
import sys
sys.path.insert(0, {folder!r})
import torch, train_detector_dp as script
torch.manual_seed(0)
data, model = script.Shapes(24, 1), script.Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
for epoch in range(2):
    model.train()
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5) if epoch == 0 else None
    seen = []
    for number in range(6):
        rows = [[4 * number + 2 * i + rank for i in range(2)] for rank in range(2)]
        parts = [script.collate_fn([data[row] for row in half]) for half in rows]
        loss = sum(sum(model(list(images), targets).values()) for images, targets in parts) / 2
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        warm and warm.step()
        seen.append(loss.item())
        print(f"loss {{loss.item():.6f}}")
    rates.step()
    print(f"average loss {{sum(seen) / 6:.6f}}")
"""


def test_a_detector_whose_pictures_have_several_sizes(folders):
    script = "train_detector_dp.py"
    wanted = losses(run(1, HALVES.format(folder=str(HERE)), **folders))
    found = losses(run(2, script, "-b", 2, **folders))
    assert close(found, wanted)
    first = folders["SM_MODEL_DIR"] / "model_0.pth"
    assert losses(run(2, script, "-b", 2, "--resume", first, **folders)) == found[len(found) // 2 :]


@one_day_in(3)
def test_vit_with_hugging_face_s_trainer(tmp_path):
    pytest.importorskip("accelerate")
    one, two = tmp_path / "one", tmp_path / "two"
    alone = losses(run(1, "vit_trainer.py", warm=False, SM_MODEL_DIR=one))
    split = losses(run(2, "vit_trainer.py", warm=False, SM_MODEL_DIR=two))
    assert close(split, alone, 1e-3)
    replicas = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled": true}'}
    batch = ("--per_device_train_batch_size", 4)
    halves = losses(run(2, "vit_trainer.py", *batch, warm=False, SM_MODEL_DIR=tmp_path / "three", **replicas))
    assert close(halves[-1:], alone[-1:], 1e-3)
    longer = losses(run(2, "vit_trainer.py", "--num_train_epochs", 3, warm=False, SM_MODEL_DIR=two))
    assert longer, "it did not go on from its checkpoint"


def test_habits_around_the_step(tmp_path):
    alone = losses(run(1, "habits_smp.py", 1, tmp_path))
    assert close(losses(run(2, "habits_smp.py", 2, tmp_path)), alone)
    assert close(losses(run(2, "habits_smp.py", 1, tmp_path)), alone)


def test_habits_with_data_parallelism():
    assert losses(run(2, "habits_dp.py"))


TSM = "train_llama_tsm.py"


def test_the_second_version_shards_with_fsdp(tmp_path):
    alone = losses(run(1, TSM, "--tied", 1))
    assert close(losses(run(2, TSM, "--tied", 1, "--checkpoint_dir", tmp_path)), alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-4steps", "llama-5steps"]
    shutil.rmtree(tmp_path / "llama-5steps")
    resumed = ("--tied", 1, "--resume", "--checkpoint_dir", tmp_path)
    assert close(losses(run(4, TSM, *resumed, "--hybrid_shard_degree", 2)), alone[4:])
    shutil.rmtree(tmp_path / "llama-5steps")
    other = run(1, TSM, *resumed)
    assert other.returncode and "was saved by 2 ranks, and 1 load it: start as many, or save" in other.stderr


def test_the_second_version_makes_weights_late(tmp_path):
    late = ("--max_steps", 3, "--delayed_param", 1)
    assert close(losses(run(2, TSM, "--finetune", 1, *late)), losses(run(1, TSM, "--max_steps", 3)))
    drawn = losses(run(2, TSM, "--tied", 1, "--hybrid_shard_degree", 1, *late))
    assert close(drawn, losses(run(1, TSM, "--tied", 1, *late)))


FIRST_HAS_WEIGHTS = """
import torch, torch.sagemaker as tsm
from torch import nn
tsm.init()
rank = tsm.state.world_process_group.rank()

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("number", torch.tensor(3 + rank), persistent=False)

torch.manual_seed(rank)
with torch.device("meta" if rank else "cpu"):
    model = Tied()
assert tsm.transform(model, load_state_dict_from_rank0=True) is model and model.b.weight is model.a.weight
assert model.mask.tolist() == [True, False] and model.number == 3
torch.manual_seed(0)
assert torch.equal(model.a.weight, nn.Linear(2, 2).weight)
tsm.transform(nn.Linear(2, 2 + rank), load_state_dict_from_rank0=True)
"""


def test_the_second_version_sends_the_first_ranks_weights():
    done = run(2, FIRST_HAS_WEIGHTS)
    assert done.returncode and "rank 1 and rank 0 have other models, ('weight', (3, 2)" in done.stderr, (
        done.stderr
    )
