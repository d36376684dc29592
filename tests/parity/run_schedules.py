"""Worker: trains cases of the zoo with every schedule, split over its ranks, and compares with one process.

By hand, from the root of the repository; two replicas of two partitions:

    PYTHONPATH=. python -m weft run -n 4 tests/parity/run_schedules.py --partitions 2 GPT2LMHeadModel/zb_h1
"""

from __future__ import annotations

import atexit
import copy
import functools
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import weft.torch as weft
from tests.parity.compare import Comparison, Record
from tests.parity.split import train_split
from tests.parity.worker import arguments, work
from tests.parity.zoo import CASES
from tests.parity.zoo.case import Batch
from weft import schedule
from weft.config import PIPELINES
from weft.plan.option import Option
from weft.torch.backward import weight_gradients
from weft.torch.split import automatic

MICROBATCHES = 8
BUCKET_MIB = 0.01  # several buckets for each of the small models
MODELS = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "SwinForImageClassification",
    "ResNetForImageClassification",
]
NAMED = [pipeline for pipeline in PIPELINES if pipeline != "file"]
BY_FILE = [f"{model}/file" for model in (MODELS[0], MODELS[3], MODELS[6], MODELS[9])]
LIMITED = [
    f"{model}/{kind}+limit" for model in (MODELS[0], MODELS[3], MODELS[6]) for kind in ("auto", "list")
]
"""Under a limit on memory no forward pass begins before what the schedule names before it."""
DECIDED = [f"{MODELS[0]}/{kind}+number" for kind in ("1f1b", "auto")]
"""The number of microbatches is decided by measured costs."""
TURNS = [f"{model}/turn" for model in (MODELS[0], MODELS[1], MODELS[5])]
"""List scheduling on a V whose turn is one stage."""
ITEMS = (
    [f"{model}/{pipeline}" for model in MODELS for pipeline in NAMED] + BY_FILE + LIMITED + DECIDED + TURNS
)


@functools.lru_cache(1)
def alone(name: str) -> tuple[torch.nn.Module, Record]:
    """A case, untrained, and what one process makes of it."""
    return CASES[name].trained_alone(MICROBATCHES)


def written(partitions: int, microbatches: int) -> str:
    """The path of a file with a schedule: that of `zbv`, but every second backward pass is whole."""
    made = schedule.make("zbv", partitions, microbatches)
    rows = [
        [
            action._replace(kind="B") if action.kind == "I" and not action.microbatch % 2 else action
            for action in row
            if action.kind != "W" or action.microbatch % 2
        ]
        for row in made.ranks
    ]
    made = replace(made, ranks=tuple(map(tuple, rows)))
    with tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False) as file:
        file.write(schedule.to_csv(made))
    atexit.register(os.unlink, file.name)
    return file.name


def only_a_turn(*_: Any) -> list[Option]:
    return [Option("list", like="v", splits=True)]


def own_part(batch: Batch, replica: int, replicas: int) -> Batch:
    """The rows of a replica."""
    return {name: value.chunk(replicas)[replica] for name, value in batch.items()}


def run_item(item: str, partitions: int) -> tuple[str, dict[str, Any]]:
    """Some steps with one schedule."""
    name, _, pipeline = item.partition("/")
    pipeline, _, more = pipeline.partition("+")
    net, expected = alone(name)
    replicas = weft.rdp_size()
    turn, pipeline = pipeline == "turn", pipeline.replace("turn", "list")
    settings = {"partitions": partitions, "microbatches": MICROBATCHES // replicas, "pipeline": pipeline}
    if pipeline != "1f1b":  # this job compares by itself: once for each model is enough
        settings["verify"] = "off"
    if pipeline == "file":
        settings["schedule_file"] = written(partitions, MICROBATCHES // replicas)
    if more == "limit":
        settings["memory_limit"] = 8.0
    elif more == "number":
        settings["microbatches"] = "auto"
    weft.init(settings)
    case = CASES[name]
    mine = [own_part(batch, weft.rdp_rank(), replicas) for batch in case.batches()]
    with patch.object(automatic, "options_for", only_a_turn) if turn else nullcontext():
        actual = train_split(
            copy.deepcopy(net), mine, case.loss_of, case.optimizer_for, bucket_cap_mb=BUCKET_MIB
        )
    if replicas > 1:
        losses = torch.tensor(actual.losses)
        dist.all_reduce(losses, group=weft.get_rdp_process_group())
        actual.losses = (losses / replicas).tolist()
        actual.buffers = {}  # running statistics are those of each replica's own data
        actual.state = {}
    comparison = Comparison()
    comparison.record(actual, expected)
    return comparison.report(), comparison.summary()


if __name__ == "__main__":
    weight_gradients.FUSED_BYTES = 0  # so that gradients of these small weights are added up in one call, too
    work(arguments(ITEMS), run_item)
