"""Valid things of every kind that weft reads, each in a folder of its own."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

import weft.torch as weft
from weft.analysis.run import Device, Facts, Failed, Sample, Unit
from weft.communication.messages import pack
from weft.graph.transformer import transformer
from weft.machines.catalogue import host_of
from weft.machines.machine_file import host_to_json
from weft.plan.measured.planned import Part, Planned
from weft.profiler.clock import Clock
from weft.profiler.facts import write_facts
from weft.profiler.format import RECORD
from weft.profiler.recorder import SCRIPT as SCRIPT_LINES
from weft.profiler.recorder import Recorder
from weft.profiler.samples import line_of, open_samples
from weft.profiler.steps import Book
from weft.timeline import Span, Timeline
from weft.watch import failed


@dataclass
class Trained:
    """A model, its optimizer and what of them was saved."""

    model: Any
    optimizer: Any
    schedule: Any
    saved: dict[str, Tensor]
    user: Any

    @property
    def also(self) -> dict[str, Any]:
        """What is saved beside model and optimizer."""
        return {"schedule": self.schedule}

    def now(self) -> dict[str, Tensor]:
        """Everything that a resumed job has back."""
        states = self.optimizer.state_dict()["state"]
        found = {f"model/{name}": value.clone() for name, value in self.model.state_dict().items()}
        for number, entry in states.items():
            found |= {
                f"optimizer/{number}/{key}": torch.as_tensor(value).clone() for key, value in entry.items()
            }
        for number, group in enumerate(self.optimizer.param_groups):
            values = {key: value for key, value in group.items() if key != "params"}
            found |= {f"optimizer/group {number}/{key}": _number(value) for key, value in values.items()}
        found["also/schedule"] = _number(self.schedule.state_dict())
        return found


def _number(value: Any) -> Tensor:
    """A tensor that tells of a value's type and of all in it, but not of what objects it has."""
    return torch.tensor(zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode()))


MESSAGE = {
    "a": (1, 2.5, None),
    3: [torch.ones(2, 3), b"xyz"],
    "z": {1, 2},
    "big": 2**80,
    "dtype": torch.float16,
}
"""An object that ranks send each other."""
CONFIG = json.dumps(
    {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 688, "vocab_size": 1000, "max_position_embeddings": 256,
        "num_local_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
    }
)  # fmt: skip
"""A transformer as Hugging Face describes it."""
USER = {"number": 3, "names": ["a", "b"], "tuple": (1, 2.5), "big": 2**70, "t": None}


def train(made: Trained) -> None:
    model, optimizer = made.model, made.optimizer

    @weft.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    optimizer.zero_grad()
    step(model, torch.randn(8, 4))
    optimizer.step()
    made.schedule.step()


def trained() -> Trained:
    """One step of training; all shapes are different, so that tensors cannot stand in for each other."""
    weft.init({})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7, bias=False))
    model = weft.DistributedModel(net)
    groups = [
        {"params": [net[0].weight, net[0].bias], "name": "first", "layers": [0], "weight_decay": 0.1},
        {
            "params": [net[1].weight, net[1].bias],
            "name": "second",
            "layers": [1],
            "lr": 0.05,
            "scale": {"of": 0.5},
        },
        {"params": [net[2].weight], "name": "last", "layers": [2], "frozen": False, "betas": (0.8, 0.9)},
    ]
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(groups, lr=0.1))
    warm = LambdaLR(
        optimizer, [lambda step: 0.5 ** (2 - step), lambda step: 1.0, lambda step: 1 / (step + 1)]
    )
    schedule = SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 10)], milestones=[2])
    made = Trained(model, optimizer, schedule, {}, USER)
    train(made)
    made.saved = made.now()
    return made


def write(root: Path, made: Trained) -> None:
    """All samples; the model takes another step afterwards."""
    state = {name: value.clone() for name, value in made.model.module.state_dict().items()}
    weft.save_checkpoint(
        root / "own", "a", model=made.model, optimizer=made.optimizer, user_content=USER, also=made.also
    )
    weft.save_checkpoint(root / "full", "a", partial=False, model=made.model, user_content=USER)
    older = root / "older" / "a_partial"
    older.mkdir(parents=True)
    torch.save(made.model.local_state_dict(), older / "model_0_0.pt")
    torch.save(made.optimizer.local_state_dict(), older / "optimizer_0_0.pt")
    torch.save({"a": 1}, older / "user_content.pt")
    weft.export_checkpoint(root / "own", root / "torch" / "model.pt", "torch")
    weft.export_checkpoint(root / "own", root / "summed" / "model.safetensors", "safetensors")
    (root / "safetensors").mkdir()
    shutil.copy(root / "summed" / "model.safetensors", root / "safetensors")
    legacy = root / "legacy" / "model.pt"
    legacy.parent.mkdir()
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    weft.export_checkpoint(root / "own", root / "distributed" / "model", "distributed")
    shutil.copytree(root / "distributed", root / "summed folder")
    (root / "distributed" / "model" / "SHA256SUMS").unlink()
    with zipfile.ZipFile(root / "torch" / "model.pt") as archive:
        archive.extractall(root / "archive")
    _huggingface(root / "huggingface", state)
    _recording(root / "recording" / "recording")
    _traces(root / "traces" / "traces")
    _run(root / "run" / "run")
    _texts(root)
    train(made)


def _huggingface(root: Path, state: dict[str, Tensor]) -> None:
    import safetensors.torch

    root.mkdir()
    places = {}
    for number, name in enumerate(state):
        file = f"model-{number % 2}.safetensors"
        places[name] = file
    for file in sorted(set(places.values())):
        held = {name: state[name].contiguous() for name in places if places[name] == file}
        safetensors.torch.save_file(held, root / file, {"format": "pt"})
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _recording(root: Path) -> None:
    for rank in range(2):
        recorder = Recorder.open(root, rank, 2)
        for step in range(3):
            for microbatch in range(4):
                start = step + microbatch / 10
                recorder.add("F", step, microbatch, start, start + 0.05, rank)
            recorder.add("step", step, -1, step, step + 0.5)
        recorder.close()
    own, other = Clock.here().identity.hex(), "0f" * 16
    marks = [[0.0, 5.0, 0.001], [60.0, 5.5, 0.001]]
    kept = {"weft": "clock", "version": 1, "clock": own, "of": other, "marks": marks}
    (root / "host-node.clock.json").write_text(json.dumps(kept))
    assert (root / "rank0.spans").stat().st_size > 10 * RECORD.size


def _traces(root: Path) -> None:
    root.mkdir(parents=True)
    names = (
        "ProfilerStep#1",
        "0F1",
        "gloo:recv",
        "gloo:all_reduce",
        "aten::mm",
        "autograd::engine::evaluate_function: X",
    )
    for rank in range(2):
        events = [
            {"ph": "X", "cat": "user_annotation" if number < 4 else "cpu_op", "name": name, "pid": 1, "tid": 1,
             "ts": 10.0 * number, "dur": 100.0 if number == 0 else 5.0, "args": {"Src Rank": 0}}
            for number, name in enumerate(names)
        ]  # fmt: skip
        known = {"rank": rank, "world_size": 2}
        text = json.dumps({"distributedInfo": known, "baseTimeNanoseconds": 1 << 60, "traceEvents": events})
        (root / f"{rank}.json").write_text(text)
        with gzip.open(root / f"{rank}-more.json.gz", "wt") as file:
            file.write(text)


def _run(root: Path) -> None:
    clock = Clock.here()
    for rank in range(2):
        recorder = Recorder.open(root, rank, 2, clock)
        recorder.book = Book.open(root, rank, 2, clock)
        units = (Unit("first", 0, 0.1, 0.2, 64), Unit("second", 1, 0.1, 0.2, 64))
        facts = Facts(
            rank, 2, "node", 7, rank, settings={"partitions": 2}, units=units,
            planned=Planned(0.5, (Part(0.1, 0.2, 64),) * 2),
        )  # fmt: skip
        write_facts(root, facts, clock)
        for step in range(1, 5):
            recorder.begin_step(step)
            recorder.add("F", step, 0, step, step + 0.5, rank)
            recorder.end_step(32, 1000)
            recorder.note({"loss": 1.0 / step, "norm": math.inf})
        recorder.close()
    failed.leave(root, Failed("rank 1 on node (pid 7) failed", 1, 3))
    lines = [{"file": "/a/train.py", "line": 3, "text": "x", "asleep_s": 0.5, "computing_s": 0.25}]
    (root / f"rank0{SCRIPT_LINES}").write_text(json.dumps({"weft": "script", "version": 1, "lines": lines}))
    file = open_samples(root, "node", clock)
    for second in range(3):
        file.write(line_of(Sample(second, (0.5, 1.0), devices=(Device(0.5, 4, 8),))))
    file.close()


COSTS = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, parameter_size=80.0"


def _texts(root: Path) -> None:
    graph = transformer(3, 64, 2, 256, 1000, 32).to_json()
    profile = "".join(f"node{n} -- Linear(4, 4) -- {COSTS}\n" for n in range(1, 5))
    profile += "".join(f"\tnode{n} -- node{n + 1}\n" for n in range(1, 4))
    spans = [Span(rank, "F", i, float(i), i + 1.0, rank, "x", 1) for rank in range(2) for i in range(3)]
    csv = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    settings = {
        "partitions": 2,
        "microbatches": 4,
        "pipeline": "1f1b",
        "memory_limit": 1.5,
        "ddp": True,
    }
    slurm = {
        "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu[01-02],x[3,5-7]",
    }  # fmt: skip
    torchrun = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500", "WEFT_LEADER": "10.0.0.1:29400",
    }  # fmt: skip
    options = {
        "WEFT_CONFIG": json.dumps(settings), "WEFT_SET": '{"optimize": "speed"}',
        "SM_HP_MP_PARAMETERS": '{"partitions": 2, "placement_strategy": "cluster"}',
        "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}',
    }  # fmt: skip
    detail = '{ "StartStep": 5, "NumSteps": 3, }  # steps'
    job = {
        "ProfilerConfig": {
            "ProfilingIntervalInMilliseconds": 500, "ProfilingParameters": {"DetailedProfilingConfig": detail}
        },
        "ProfilerRuleConfigurations": [
            {"RuleParameters": {"rule_to_invoke": "ProfilerReport", "StepOutlier_stddev": "4"}}
        ],
        "DebugRuleConfigurations": [{"RuleConfigurationName": "Overfit", "RuleParameters": {"ratio_threshold": "0.1"}}],
        "DebugHookConfig": {"CollectionConfigurations": [{"CollectionName": "losses"}]},
    }  # fmt: skip
    library = {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "memory_weight": 0.5}}}
    mpi = {
        "enabled": True,
        "processes_per_host": 2,
        "custom_mpi_options": "-x A='b c' -mca btl tcp,self -x D",
    }
    distribution = {"smdistributed": library, "mpi": mpi, "torch_distributed": {"enabled": False}}
    began = {"pid": 7, "began": 9, "boot": "b", "host": "node1"}
    ran = {
        "engine": "local",
        "script": "x.py",
        "ranks": 2,
        "time": 1.7e9,
        "launcher": began,
        "events_from": 0,
    }
    events: list[dict[str, Any]] = [
        {"time": 1.7e9, "event": "attempt", "attempt": 0, "logs": "attempt-0", "ranks": 2},
        {"time": 1.7e9, "event": "started", "attempt": 0, "ranks": {"0": {"pid": 8, "host": "node1"}}},
        {"time": 1.8e9, "event": "failed", "attempt": 0, "rank": 1, "headline": "rank 1 failed"},
        {"time": 1.8e9, "event": "ended", "attempt": 0, "code": 1},
    ]
    files = {
        "ran/run.json": json.dumps(ran), "ran/events.jsonl": "".join(f"{json.dumps(each)}\n" for each in events),
        "ran/failure.json": json.dumps({"rank": 1, "headline": "rank 1 failed", "stacks": {}}),
        "distribution/distribution.json": json.dumps(distribution),
        "hosts/hosts": "# all\nnode1 slots=2\nnode2:2\n",
        "machine/machine.json": host_to_json(host_of("L4", 4)), "config/config.json": CONFIG,
        "graph/graph.json": graph, "profile/profile.txt": profile, "timeline/timeline.json": Timeline(spans).to_json(),
        "schedule/schedule.csv": csv, "settings/settings.json": json.dumps(settings),
        "slurm/environment": _lines(slurm), "torchrun/environment": _lines(torchrun),
        "options/environment": _lines(options), "message/message.json": pack(MESSAGE).text,
        "debugger/job.json": json.dumps(job), "script/train.py": SCRIPT,
    }  # fmt: skip
    for number, line in enumerate(COMMANDS):
        files[f"command{number}/arguments"] = "\n".join(line)
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    for number in range(len(COMMANDS)):
        (root / f"command{number}" / "graph.json").write_text(graph)
        (root / f"command{number}" / "two.csv").write_text(csv)
        (root / f"command{number}" / "config.json").write_text(CONFIG)


def _lines(values: dict[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in values.items())


SCRIPT = (Path(__file__).parents[2] / "examples" / "train_hybrid.py").read_text(encoding="utf-8")
"""What `weft check` reads."""

COMMANDS = tuple(
    line.split()
    for line in (
        "partition graph.json --partitions 2 --memory 24GiB,16GiB --speeds 2,1 --link 25GB/s,5us --microbatches 4",
        "simulate graph.json --partitions 2 --microbatches 4 --schedule looped --chunks 2 --memory 24GiB --out x.json",
        "simulate graph.json --partitions 2 --microbatches 2 --schedule file --csv two.csv --html x.html",
        "plan --cluster 2x8xA100-80 --config config.json --global-batch 64 --tokens 1B --data 100GB --epoch 30s",
        "simulate graph.json --partitions 4 --link 300GB/s,2us --inter-link 25GB/s,shared --ranks-per-host 2 --json",
        "run -n 2 --set microbatches=8 --timeout-wait 30 -x NAME=VALUE --config {} nowhere.py --lr 0.1",
    )
)
"""Each runs in a folder with a graph and a schedule."""
