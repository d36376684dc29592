"""What a trial says of a job, from what that recorded and wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.analysis.run import Facts, Run, Step
from weft.timeline import Timeline
from weft.tune.trial import outcome_of, usual, why


def step(number: int, start_s: float, samples: int = 10, evaluates: bool = False) -> Step:
    return Step(number, start_s, 0.4, samples=samples, memory_bytes=number, evaluates=evaluates)


def test_usual_steps_train_follow_each_other_and_are_not_the_first():
    steps = [
        step(1, 0.0),
        step(2, 9.0),
        step(3, 10.0),
        step(4, 11.0, evaluates=True),
        step(5, 12.0),
        step(7, 13.0),
    ]
    assert [(one.step, taken) for one, taken in usual(steps)] == [(3, 1.0)]


def test_replicas_add_up_and_ranks_of_a_pipeline_do_not():
    times = [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]  # steps 3, 4 and 5 take 2, 1 and 1 s
    steps = {rank: tuple(step(n, at) for n, at in enumerate(times, start=1)) for rank in range(4)}
    facts = {
        rank: Facts(rank, 4, pp_rank=rank % 2, rdp_rank=rank // 2, settings={"microbatches": 2})
        for rank in range(4)
    }
    found = outcome_of(Run("made", Timeline([]), facts, steps))
    assert (found.samples_per_s, found.steps, found.step_s, found.memory_bytes) == (20.0, 3, 1.0, 6)
    assert found.settings == {"microbatches": 2}
    assert outcome_of(Run("made", Timeline([]), facts, {**steps, 3: ()})).steps == 0, "one has none yet"
    assert outcome_of(Run("made", Timeline([]))).samples_per_s is None


def job(ranks: int, pp: int = 1, tp: int = 1, versions: str = "torch", **settings: object) -> Run:
    """One step a second from all ranks, 10 samples for each replica."""
    steps = {rank: tuple(step(n, float(n)) for n in range(1, 7)) for rank in range(ranks)}
    own = {"microbatches": 2, "partitions": pp, "tensor_parallel_degree": tp, "inputs": "equal", **settings}
    facts = {
        rank: Facts(
            rank, ranks, pp_rank=rank // tp % pp, rdp_rank=rank // (tp * pp), settings=own, versions={versions: "2"}
        )
        for rank in range(ranks)
    }  # fmt: skip
    return Run("made", Timeline([]), facts, steps)


def test_ranks_that_split_weights_have_the_same_samples():
    assert outcome_of(job(4)).samples_per_s == 40.0
    assert outcome_of(job(4, tp=2)).samples_per_s == 20.0, "two copies"
    assert outcome_of(job(8, pp=2, tp=4)).samples_per_s == 10.0


@pytest.mark.parametrize(
    ("run", "degrees"),
    [
        (job(1), ()),
        (job(4), (1, 2, 4)),
        (job(6), (1, 2, 3, 6)),
        (job(8, pp=2), (1, 2, 4)),
        (job(2, pp=2), ()),
        (job(4, tp=2), ()),  # another number of copies would read another batch
        (job(4, tp=2, inputs="per_rank"), (1, 2, 4)),
        (job(4, inputs="first"), ()),
        (job(4, context_parallel_degree=2), ()),
        (job(4, versions="TensorFlow"), ()),
        (Run("made", Timeline([])), ()),
    ],
)
def test_degrees_that_leave_the_samples_as_they_are(run, degrees):
    assert outcome_of(run).degrees == degrees


def test_a_model_without_layers_to_cut_says_so():
    assert outcome_of(job(4, tp=2, cut_layers=0)).remark == "no layer of the model can be cut"
    assert not outcome_of(job(4, tp=2, cut_layers=3)).remark and not outcome_of(job(4, cut_layers=0)).remark


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (-9, "", "out of memory"),
        (137, "Killed", "out of memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to", "out of memory"),
        (1, "noise\nweft: rank 1 on a: ValueError\nweft: rank 0: lost", "weft: rank 1 on a: ValueError"),
        (2, "usage: train.py\ntrain.py: error: no such", "usage: train.py"),
        (0, "done", "it ended before enough steps"),
        (3, "", "exit code 3"),
    ],
)  # fmt: skip
def test_why_a_job_ended(tmp_path: Path, code: int, text: str, said: str):
    (tmp_path / "output").write_text(text)
    assert why(code, tmp_path / "output").startswith(said)
    assert why(5, tmp_path / "nowhere") == "exit code 5"
