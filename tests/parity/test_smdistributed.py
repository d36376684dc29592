"""Scripts written for smdistributed run unchanged, and compute what one process computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Completed, run_ranks
from tests.long import long

SCRIPTS = Path(__file__).parent / "smdistributed"
ONE = json.dumps({"partitions": 1, "microbatches": 2})
TWO = json.dumps({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})


def results(n, script, *args, options=(), **env) -> list:
    done: Completed = run_ranks(
        n,
        SCRIPTS / script,
        args,
        env,
        timeout=500,
        launcher="weft",
        options=["--device", "cpu", "--smdistributed", *options],
        warm=script in ("gpt2.py", "mnist.py"),  # the others find out how they were started
    ).check()
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines]


def close(one, other, tolerance=1e-5):
    return one == pytest.approx(other, rel=tolerance)


@pytest.fixture(scope="module")
def gpt2_alone():
    ((_, _, losses, _),) = results(1, "gpt2.py", "--pipeline_parallel_degree", "1")
    return losses


@long
def test_gpt2_with_data_on_the_first_rank_only(gpt2_alone, tmp_path):
    split = results(2, "gpt2.py")
    assert len(split) == 2
    for _, _, losses, _ in split:
        assert close(losses, gpt2_alone)
    half = ("--fp16", "1", "--manual_partition", "1", "--checkpoint_dir", str(tmp_path))
    for _, _, losses, again in results(2, "gpt2.py", *half):
        assert close(losses, gpt2_alone, 5e-3)
        # the tied weight adds its gradients in the order of their arrival, in 16 bits
        assert close(again[0], losses[2:], 3e-5), "32-bit masters were lost"
        assert close(again[1], losses[2:], 5e-4), "parts that are another rank's now were lost"


@long
def test_gpt2_on_two_pipelines_resumes(gpt2_alone, tmp_path):
    four = results(4, "gpt2.py", "--train_batch_size", "4", "--checkpoint_dir", str(tmp_path))
    assert sorted(replica for _, replica, _, _ in four) == [0, 0, 1, 1]
    of_replica = {replica: losses for _, replica, losses, _ in four}
    assert close([sum(pair) / 2 for pair in zip(*of_replica.values(), strict=True)], gpt2_alone)
    for _, replica, losses, again in four:
        assert losses == of_replica[replica]
        assert close(again[0], losses[2:])
        assert close(again[1], losses[2:])  # an automatic split may be another one


def test_digits_with_the_loss_in_the_step():
    ((_, *alone),) = results(1, "mnist.py", SM_HP_MP_PARAMETERS=ONE)
    split = results(2, "mnist.py", SM_HP_MP_PARAMETERS=TWO)
    assert len(split) == 2
    for _, losses, mean, accuracy in split:
        assert close(losses, alone[0]) and close(mean, alone[1]) and accuracy == alone[2]
    for _, losses, *_ in results(2, "mnist.py", "--amp", "1", SM_HP_MP_PARAMETERS=TWO):
        assert close(losses, alone[0], 2e-2)


@long
def test_both_styles_of_data_parallelism():
    found = {style: sorted(results(2, "data_parallel.py", style)) for style in ("torch", "old", "new")}
    (_, losses), (_, others) = found["torch"]
    assert losses == others and losses[-1] < 0.5 * losses[0]
    for style in ("old", "new"):
        assert [rank for rank, _ in found[style]] == [0, 1]
        for _, here in found[style]:
            assert close(here, losses)


@long
def test_trainer_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    one, four = str(tmp_path / "one"), str(tmp_path / "four")
    # Random states in its own checkpoints are refused by 4.46, see docs/migration.md.
    unsafe = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if transformers.__version__.startswith("4.") else {}
    ((_, *alone),) = results(1, "trainer.py", "--output_dir", one, **unsafe)
    split = results(
        4, "trainer.py", "--output_dir", four, "--batch", "2", options=["--set", "partitions=2"], **unsafe
    )
    assert len(split) == 4
    for mode, before, training, after, logs, (resumed, after_resumed) in split:
        assert mode == "sagemaker_model_parallel"
        assert close([before, after, training], [alone[0], alone[2], alone[1]], 1e-4)
        assert len(logs) == 4 and after < before
        assert logs == [pytest.approx(entry, rel=1e-3) for entry in alone[3]]
        assert resumed == [
            pytest.approx(entry, rel=1e-5) for entry in logs[2:]
        ]  # an automatic split may be another
        assert close(after_resumed, after)
    models = [transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in (one, four)]
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert a.detach().numpy() == pytest.approx(b.detach().numpy(), abs=1e-4), name
