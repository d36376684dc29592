"""On a GPU split models and replicas train as in one process; with messages through the host, and through NCCL.

The machine needs one GPU: see `own_gpus.py` for how ranks that share it come to NCCL. What a rank is compared with is
trained on the same GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import jobs
from tests.gpus import KEPT, VISIBLE
from tests.launching import run_ranks
from tests.parity.checks.registry import CHECKS
from tests.parity.data_parallel import CHECKS as REPLICAS
from tests.parity.jobs import ROOT, Start, environment, run_items
from tests.parity.run_schedules import MODELS, NAMED
from tests.parity.zoo import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ[KEPT], reason="no GPU on this machine"),
]

ENVIRON = {**environment(), VISIBLE: os.environ[KEPT]}

IN_PARTS = [
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification",
    "GPTNeoXForCausalLM", "Qwen3ForCausalLM", "BloomForCausalLM",
]  # fmt: skip

PARTS = 4
"""Lists of items are cut into so many jobs, which workers run beside each other."""

each_part = pytest.mark.parametrize("part", range(PARTS))


def check(script: str, items: list[str], start: Start, partitions: int = 2, replicas: int = 1) -> None:
    outcomes = run_items(script, items, partitions * replicas, partitions, start=start)
    faults = [f"{name}: {outcome.faults()}" for name, outcome in outcomes.items() if outcome.faults()]
    assert not faults, "\n".join([f"{len(faults)} of {len(items)} items", *faults])


@each_part
@pytest.mark.parametrize("start", [jobs.sharing, jobs.owning])
def test_behaviour(start: Start, part: int) -> None:
    check("run_checks.py", list(CHECKS)[part::PARTS], start)


@each_part
@pytest.mark.parametrize(("start", "every"), [(jobs.sharing, 16), (jobs.owning, 2)])
def test_models(start: Start, every: int, part: int) -> None:
    check("run_zoo.py", list(CASES)[::every][part::PARTS], start)


@each_part
def test_schedules(part: int) -> None:
    items = [f"{model}/{kind}" for model, kind in zip(MODELS * 2, NAMED, strict=False)]
    check("run_schedules.py", items[part::PARTS], jobs.owning)


@pytest.mark.parametrize(("partitions", "cases"), [(1, IN_PARTS), (2, IN_PARTS[:4])])
@pytest.mark.parametrize("start", [jobs.sharing, jobs.owning])
def test_weights_in_parts(start: Start, partitions: int, cases: list[str]) -> None:
    settings = {"WEFT_SET": json.dumps({"tensor_parallel_degree": 2})}

    def begin(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Any:
        return start(arguments, {**env, **settings}, cwd)

    check("run_zoo.py", cases, begin, partitions, replicas=2)  # two ranks for each partition


def test_schedules_of_replicas() -> None:
    items = [f"{MODELS[0]}/{kind}" for kind in ("1f1b", "zb_h1", "zbv", "auto")]
    check("run_schedules.py", items, jobs.owning, replicas=2)


AFTER_A_FAILURE = {"freezing"}
"""Checks that go on after an error: what one rank has begun in NCCL alone cannot be taken back."""


@pytest.mark.parametrize(
    ("ranks", "script", "arguments"),
    [
        (2, "parity/data_parallel.py", sorted(REPLICAS.keys() - AFTER_A_FAILURE)),
        (2, "parity/reductions.py", ["algorithms", "volumes", "compressions", "chance", "lanes"]),
        (4, "parity/reductions.py", ["algorithms", "compressions", "lanes"]),
        (2, "gpu/backend.py", []),
    ],
    ids=lambda value: Path(value).stem if isinstance(value, str) else None,
)
def test_reductions(ranks: int, script: str, arguments: list[str]) -> None:
    done = run_ranks(
        ranks, jobs.OWN, [str(ROOT / "tests" / script), *arguments], ENVIRON, timeout=900
    ).check()
    assert "passed" in done.stdout


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_failure_ends_all_ranks(partitions: int) -> None:
    path = Path(__file__).with_name("failing.py")
    done = run_ranks(2, jobs.OWN, [str(path), str(partitions)], ENVIRON, timeout=90)
    assert done.returncode == 1 and "step 1 done" in done.stdout and "step 2 done" not in done.stdout, done
    first = next(line for line in done.stderr.splitlines() if line.startswith("weft: "))
    assert "rank 1 on " in first and "ValueError: the data are broken" in first, done
