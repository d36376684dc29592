"""Scripts written for smdistributed run unchanged, and compute what one process computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Completed, run_ranks

SCRIPTS = Path(__file__).parent / "smdistributed"
ONE = json.dumps({"partitions": 1, "microbatches": 2})
TWO = json.dumps({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})


def results(n, script, *args, **env) -> list:
    done: Completed = run_ranks(
        n,
        SCRIPTS / script,
        args,
        env,
        timeout=500,
        launcher="weft",
        options=["--device", "cpu", "--smdistributed"],
    ).check()
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines]


def close(one, other, tolerance=1e-5):
    return one == pytest.approx(other, rel=tolerance)


def test_gpt2_with_data_on_the_first_rank_only():
    ((_, alone),) = results(1, "gpt2.py", "--pipeline_parallel_degree", "1")
    split = results(2, "gpt2.py")
    assert len(split) == 2
    for _, losses in split:
        assert close(losses, alone)
    for _, losses in results(2, "gpt2.py", "--fp16", "1", "--manual_partition", "1"):
        assert close(losses, alone, 5e-3)


def test_digits_with_the_loss_in_the_step():
    ((_, *alone),) = results(1, "mnist.py", SM_HP_MP_PARAMETERS=ONE)
    split = results(2, "mnist.py", SM_HP_MP_PARAMETERS=TWO)
    assert len(split) == 2
    for _, losses, mean, accuracy in split:
        assert close(losses, alone[0]) and close(mean, alone[1]) and accuracy == alone[2]
    for _, losses, *_ in results(2, "mnist.py", "--amp", "1", SM_HP_MP_PARAMETERS=TWO):
        assert close(losses, alone[0], 2e-2)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    ((_, *alone),) = results(1, "trainer.py", "--output_dir", one)
    split = results(2, "trainer.py", "--output_dir", two)
    assert len(split) == 2
    for mode, before, training, after, logs in split:
        assert mode == "sagemaker_model_parallel"
        assert close([before, after, training], [alone[0], alone[2], alone[1]], 1e-4)
        if logs:
            assert logs == [pytest.approx(entry, rel=1e-3) for entry in alone[3]]
    models = [transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in (one, two)]
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert a.detach().numpy() == pytest.approx(b.detach().numpy(), abs=1e-4), name
