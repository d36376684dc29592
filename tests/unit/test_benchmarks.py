"""Each benchmark runs, on tiny models, and its figures follow from its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.balance.by_hand import equal_blocks
from benchmarks.balance.models import MODELS
from benchmarks.contenders import CONTENDERS
from benchmarks.gpu import __main__ as gpu
from benchmarks.pipeline import __main__ as pipeline
from benchmarks.schedules import __main__ as schedules
from benchmarks.schedules.__main__ import compared, verdict
from benchmarks.turns.driver import largest_difference
from benchmarks.turns.figures import by_turns, ratio, seconds
from benchmarks.turns.samples import RankStep, Record, Step, together
from tests.long import one_day_in, one_in

ROOT = Path(__file__).parents[2]
RUNS = {
    "pipeline": ["--contenders", "weft"],
    "schedules": ["--contenders", "dualpipev,weft-zbv,weft-auto", "--microbatches", "4"],
    "balance": ["--models", "gpt-50k"],
    "data_parallel": ["--contenders", "ddp-weft,weft", "--ranks", "3"],
    "overhead": [],
    "tensor_parallel": ["--microbatches", "1"],
    "tensor_parallel: hybrids": ["--ranks", "4", "--microbatches", "4"],
    "simulator": ["--schedules", "interleaved_1f1b", "--microbatches", "4"],
}
OTHERS = {
    "all_reduce": (["--most", "0.25", "--budget", "1"], "| 0.25 |"),
    "lengths": (
        ["--rows", "16", "--longest", "24", "--microbatches", "2", "--batches", "1"],
        "| of the batch no padding |",
    ),
    "sends": (["--sizes", "0.5", "--rounds", "1", "--trips", "2"], "| 0.5 |"),
    "loss_parity": (["--steps", "2", "--seeds", "0", "--compressions", "fp32,int8"], "| digits | 0 | int8 |"),
    "recording": (["--spans", "2000", "--steps", "20", "--seconds", "0.2", "--rounds", "1"], "| a span |"),
    "plan": (["--rows", "tests/data/step_times.csv", "--brief"], "| **strict** | 28 |"),
    "checkpoint": (["--small"], "| torch.distributed.checkpoint |"),
    "pretrained": (["--gib", "0.01", "--width", "128", "--ranks", "2"], "| 2 | delayed |"),
    "gpu": (["--dry", "--minutes", "10"], "| machine for weft plan | measured |"),
    "experts": (
        "--layers 1 --width 32 --experts 4 --tokens 64 --steps 1 --rounds 1".split(),
        "| shared by two replicas |",
    ),
    "generation": (
        "--layers 2 --width 32 --prompts 4 --tokens 3 --steps 1 --rounds 1".split(),
        "| 4 |",
    ),
    "context_parallel": (
        "--layers 1 --width 32 --heads 4 --keys 2 --positions 16 --steps 1 --rounds 1".split(),
        "| 16 | 2 | all-to-all |",
    ),
    "shared_parameters": (["--layers", "4", "--width", "64", "--steps", "1"], "| for each microbatch |"),
}
"""Options that make it short, and what its table has then."""


def record(name: str, *steps_s: float, busy: float = 0.0) -> Record:
    found = Record(name, first=Step(9.0, 9.0, 0.0), memory=[])
    found.steps = [Step(step_s, 2 * step_s, busy) for step_s in steps_s]
    return found


@one_day_in(3)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", one_in(9, RUNS))
def test_it_runs(name: str, tmp_path: Path):
    out = tmp_path / "figures.json"
    options = ["--small", "--rounds", "1", "--steps", "1", "--patience", "0", "--json", str(out), *RUNS[name]]
    run(name.partition(":")[0], options)
    assert json.loads(out.read_text(encoding="utf-8"))


@one_day_in(3)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", one_in(8, OTHERS))
def test_it_prints_its_table(name: str):
    if name == "pretrained":
        pytest.importorskip("transformers")
    options, row = OTHERS[name]
    assert row in run(name, options)


def test_the_contenders_that_run_by_default_are_there():
    named = {*schedules.OURS, *schedules.PEERS, *pipeline.DEFAULT.split(",")}
    assert named - CONTENDERS.keys() == set()


def test_without_namespaces_the_slow_network_is_skipped():
    assert run("slow_network", [], PATH="").startswith("skipped: two network namespaces cannot be made here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == gpu.NO_GPU
    assert capsys.readouterr().out == (
        "there is no GPU here that PyTorch can use: nothing was measured (--dry runs every part on the CPU)\n"
    )


def test_a_part_that_fails_or_has_no_time_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The file is as a worker leaves it that is ended."""
    wait = (
        "import sys, time; print('weft: no memory'); sys.exit(3) if sys.argv[1] == 'fail' else time.sleep(60)"
    )
    row = {"what": "weft", "value": 51.25, "unit": "ms", "beside": "DDP", "base": 50.0, "note": "a | b"}
    found = gpu.Run(0, True, tmp_path)
    parts = [gpu.Part(name, 1.0, lambda run, s, name=name: ["-c", wait, name]) for name in ("fail", "stay")]
    failed, stayed = (gpu.rows_of(part, found, 10.0 if part.name == "fail" else 1.0) for part in parts)
    assert failed[0]["note"] == "exit code 3: weft: no memory" and stayed[0]["note"] == "ended after 1 s"
    assert gpu.line_of({"part": "replicas", **row}) == (
        "| replicas | weft | 51.2 ms | DDP | 50 ms | 1.025 | a / b |"
    )
    monkeypatch.setattr(gpu, "LEAST_S", 1e9)
    out = tmp_path / "rows.json"
    assert gpu.main(["--dry", "--only", "memory,replicas", "--json", str(out)]) == 1
    assert [row["note"] for row in json.loads(out.read_text())["rows"]] == ["no time was left"] * 2


def run(name: str, options: list[str], **more: str) -> str:
    """What a benchmark prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **more}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_peers_best_is_the_one_with_the_shortest_step():
    records = [
        record("one-process", 4.0, 4.2, 4.1),
        record("gpipe", 3.0, 3.2, 3.1),
        record("dualpipev", 2.0, 2.0, 2.0),
        record("weft-auto", 1.8, 1.9, 1.7),
    ]
    lines = compared(records)
    assert {line["best_peer"] for line in lines} == {"dualpipev"}
    assert [line["peer_ratio"] for line in lines] == pytest.approx([2.05, 1.55, 1.0, 0.9])
    assert [line["peer_turns"] for line in lines] == pytest.approx([2.05, 1.55, 1.0, 0.9])
    assert verdict(lines) == "\nweft-auto: 0.900 of dualpipev, 0.900 by turns; target 0.95 reached"
    records[-1] = record("weft-auto", 1.96)
    assert "0.980 of dualpipev, 0.980 by turns; target 0.95 missed" in verdict(compared(records))


def test_without_a_peer_nothing_is_compared_with_it():
    lines = compared([record("one-process", 4.0), record("weft-auto", 2.0)])
    assert "best_peer" not in lines[0] and verdict(lines) == ""


def test_only_quiet_steps_count_unless_there_are_none():
    mixed = record("weft", 1.0, 1.2)
    mixed.steps += record("weft", 9.0, busy=0.5).steps
    assert seconds(mixed) == [1.0, 1.2]
    assert seconds(record("weft", 9.0, busy=0.5)) == [9.0]
    found, error = ratio(mixed, record("one-process", 2.0))
    assert found == pytest.approx(0.55) and 0.0 < error < 0.1


def test_by_turns_a_slow_machine_is_slow_for_both():
    base, other = record("one-process", 1.0, 3.0, 1.0, 3.0), record("weft", 0.9, 2.7, 0.9, 2.7)
    assert by_turns(other, base) == (pytest.approx(0.9), pytest.approx(0.0, abs=1e-9))
    other.steps[1:2] = record("weft", 9.0, busy=0.5).steps
    assert by_turns(other, base)[0] == pytest.approx(0.9), "another process was busy"


def test_only_steps_at_the_cores_full_speed_count():
    mixed = record("weft", 1.0)
    mixed.steps += [Step(1.1, 2.2, 0.0, pace_s=0.011), Step(1.5, 3.0, 0.0, pace_s=0.015)]
    mixed.best_pace_s = 0.010
    assert seconds(mixed) == [1.0, 1.1] and len(mixed.kept()) == 2


def test_a_step_lasts_from_the_first_start_to_the_last_end():
    ranks = (RankStep(1.0, 3.0, 4.0, 1.5, 5.0, 0.01), RankStep(1.5, 3.5, 4.0, 1.0, 5.0, 0.02))
    assert together(ranks) == Step(
        wall_s=2.5, cpu_s=2.5, other_cores=0.625, pace_s=0.02, ranks_cpu_s=(1.5, 1.0)
    )


def test_gradients_are_compared_by_norm_and_rounding_by_that_of_the_largest():
    expected = {"weight": torch.tensor([3.0, 4.0]), "key.bias": torch.tensor([1e-9])}
    found = {"weight": torch.tensor([3.0, 4.5]), "key.bias": torch.tensor([-1e-9])}
    assert largest_difference(found, expected) == pytest.approx(0.1)
    assert largest_difference(expected, {**expected, "key.bias": found["key.bias"]}) < 1e-4
    with pytest.raises(ValueError, match=r"gradients of other parameters: \['key.bias'\]"):
        largest_difference({"weight": found["weight"]}, expected)


def placed(name: str) -> dict[str, int]:
    model = MODELS[name]
    return equal_blocks(model.build(True), model.blocks, 2)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_dealt_out_equally_and_everything_is_placed(name: str):
    model = MODELS[name].build(True)
    places = placed(name)
    inside = {id(p) for module in places for p in model.get_submodule(module).parameters()}
    assert inside == {id(p) for p in model.parameters()}
    blocks = [
        at for module, at in places.items() if module[-1].isdigit() and "conv" not in module.split(".")[-1]
    ]
    assert blocks == sorted(blocks) and abs(blocks.count(0) - blocks.count(1)) <= 1


def test_what_is_no_block_goes_with_its_neighbours():
    places = placed("whisper")
    assert places["model.encoder.conv1"] == 0 == places["model.encoder.layer_norm"]
    assert places["model.decoder.embed_tokens"] == 1 == places["proj_out"], "before the decoder's first block"
    assert placed("t5")["lm_head"] == placed("t5")["shared"] == 0, "one parameter"
    assert placed("swin")["swin.encoder.layers.0.downsample"] == 0, "after its stage's last block"


def test_too_few_blocks():
    with pytest.raises(ValueError, match=r"1 modules match 0, there must be at least 2"):
        equal_blocks(nn.Sequential(nn.Linear(1, 1)), "0", 2)
