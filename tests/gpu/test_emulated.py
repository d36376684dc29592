"""Without a GPU: no tensor of a step is on the wrong device, and no step waits more often with more microbatches.

See `emulated_tensors.py` for the GPU that takes part. A machine with a GPU has `test_training.py` instead.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import jobs
from tests.launching import run_ranks
from tests.long import long, one_in
from tests.parity.checks.registry import CHECKS
from tests.parity.jobs import FOLDER, ROOT, environment, run_items
from tests.parity.run_schedules import MODELS, NAMED
from tests.parity.zoo import CASES

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has kernels for CUDA"),
]

HERE = Path(__file__).parent
OF_MESSAGES = "in torch_dist.py "
"""Waits of threads that send and receive; through NCCL no other thread waits."""
NOW_AND_THEN = "_local_scalar_dense in watching.py _loss"
"""The loss is shown every few seconds."""
ONCE_A_STEP = {
    "clipped": {"copy to the host in clip.py norm_along", "copy to the device in clip.py norm_along"},
    "scaled": {
        "copy to the host in amp.py _unscale_grads_", "copy to the device in amp.py _unscale_grads_",
        "_local_scalar_dense in waits.py waits",  # PyTorch's own: whether to step
    },
    "offloaded": {"stream.synchronize in states.py _finish"},
}  # fmt: skip
ONCE_A_STEP |= dict.fromkeys(("tensor", "sequence"), ONCE_A_STEP["clipped"])
NOT_HERE = {
    "ready_made_modules_of_torch", "nested_tensors_between_modules", "packed_sequences_between_parts"
}  # fmt: skip
"""Checks of what has other operations on a GPU, which the CPU has no kernels for; Dynamo cannot look into kernels."""
ITEMS = [name for name in CHECKS if name not in NOT_HERE and "compiled" not in name]


def test_it_is_as_strict_as_a_gpu() -> None:
    command = [sys.executable, str(jobs.EMULATED), str(HERE / "strict.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout == "passed\n", f"{done.stdout}\n{done.stderr}"


def found(
    folder: Path, apart: bool, partitions: int, cases: list[str]
) -> dict[str, dict[str, dict[str, int]]]:
    """The waits of each case on any rank, at most, by the number of microbatches."""
    before = [str(jobs.OWN)] if apart else []
    arguments = [*before, str(HERE / "waits.py"), str(folder / "waits"), str(partitions), *cases]
    run_ranks(2, jobs.EMULATED, arguments, environment(), timeout=600).check()
    ranks = [json.loads((folder / f"waits{rank}").read_text(encoding="utf-8")) for rank in range(2)]
    return {
        case: {
            count: {
                what: max(rank[case][count].get(what, 0) for rank in ranks)
                for rank_ in ranks
                for what in rank_[case][count]
            }
            for count in ranks[0][case]
        }
        for case in cases
    }


@pytest.mark.parametrize(
    ("partitions", "cases"),
    one_in(
        2,
        [
            (2, ["plain", "clipped", "checkpointed", "scaled", "offloaded", "chunked", "zero_bubble"]),
            (1, ["plain", "scaled", "offloaded", "sharded", "tensor", "sequence", "context"]),
        ],
    ),
)
def test_no_step_waits_more_often_with_more_microbatches(
    tmp_path: Path, partitions: int, cases: list[str]
) -> None:
    for case, by_count in found(tmp_path, True, partitions, cases).items():
        for count, waited in by_count.items():
            waited.pop(NOW_AND_THEN, None)
            beside = {what: times for what, times in waited.items() if OF_MESSAGES not in what}
            expected = ONCE_A_STEP.get(case, set())
            assert beside == dict.fromkeys(expected, 1), (case, count, waited)
            assert all(what.startswith("stream.synchronize") for what in waited.keys() - beside.keys()), (
                waited
            )


def check(script: str, items: list[str], start: jobs.Start, ranks: int = 2, partitions: int = 2) -> None:
    assert (FOLDER / script).exists()
    outcomes = run_items(script, items, ranks, partitions, start=start)
    faults = [f"{name}: {outcome.faults()}" for name, outcome in outcomes.items() if outcome.faults()]
    assert not faults, "\n".join([f"{len(faults)} of {len(items)} items", *faults])


@long
@pytest.mark.parametrize("part", range(30))
def test_behaviour(part: int) -> None:
    """Half of the parts with messages through the host, half as through NCCL."""
    check("run_checks.py", ITEMS[part::30], (jobs.emulated, jobs.emulated_apart)[part % 2])


@long
@pytest.mark.parametrize("part", range(8))
def test_models(part: int) -> None:
    check("run_zoo.py", list(CASES)[::16][part::8], jobs.emulated)


@long
def test_schedules() -> None:
    check("run_schedules.py", [f"{MODELS[0]}/{kind}" for kind in NAMED[::4]], jobs.emulated_apart)


@pytest.mark.parametrize("apart", [False, True], ids=["one GPU", "a GPU each"])
@pytest.mark.parametrize("layout", ["experts", "whole_updates"])
def test_layouts_are_those_of_one_process(layout: str, apart: bool) -> None:
    before = [str(jobs.OWN)] if apart else []
    arguments = [*before, str(HERE / "layouts.py"), layout]
    done = run_ranks(2, jobs.EMULATED, arguments, environment(), timeout=300).check()
    assert done.stdout.count(f"{layout}: passed") == 2


@pytest.mark.parametrize(("ranks", "partitions"), [(1, 1), (2, 2)])
def test_weights_in_host_memory(ranks: int, partitions: int) -> None:
    arguments = [str(HERE / "weights.py"), str(partitions)]
    done = run_ranks(ranks, jobs.EMULATED, arguments, environment(), timeout=300).check()
    assert done.stdout.count("weights: passed") == ranks
