"""Hugging Face's Trainer and TRL's: what they log, evaluate and write with a split model is what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.launching import SOURCE, run_ranks
from tests.long import one_day_in, one_in
from weft.compat.hf import options, steps
from weft.compat.hf.options import refuse
from weft.errors import ConfigError, UsageError

transformers = pytest.importorskip("transformers")
HERE = Path(__file__).parent / "jobs"
OLD = transformers.__version__.startswith("4.")
CASES = [
    "variable lengths", "smoothing", "own loss", "loss function", "accumulated", "bfloat16", "checkpointing", "workers",
    "own optimizer", "classes", "best", "generation", "halves", "evaluated first", "neighbours", "contrasts",
    "like its reference", "a second one",
]  # fmt: skip
REPLICATED = ["variable lengths", "smoothing", "accumulated", "best"]
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def found(text: str) -> list:
    return [json.loads(line.partition("RESULT ")[2]) for line in text.splitlines() if "RESULT " in line]


def alone(script: str, *args: str) -> dict:
    environ = {**os.environ, **QUIET, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, HERE / script, *args], capture_output=True, text=True, env=environ, timeout=400
    )
    assert done.returncode == 0, done.stderr
    (result,) = found(done.stdout)
    return result


def split(n: int, script: str, *args: str, options=(), **settings) -> list:
    env = QUIET | ({"SETTINGS": json.dumps(settings)} if settings else {})
    done = run_ranks(n, HERE / script, args, env, timeout=400, launcher="weft", options=options)
    return found(done.check().stdout)


def equal(one, other, tolerance) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(
            equal(*pair, tolerance) for pair in zip(one, other, strict=True)
        )
    return other == (pytest.approx(one, rel=tolerance) if isinstance(one, float) else one)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return alone("hf_trainer.py", str(tmp_path_factory.mktemp("one")), "4", "7", *CASES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    results = split(2, "hf_trainer.py", str(tmp_path_factory.mktemp("two")), "4", "7", *CASES)
    assert len(results) == 2
    return results


@pytest.mark.parametrize("case", CASES)
def test_a_split_trainer_does_what_one_process_does(case, one_process, two_ranks):
    for result in two_ranks:
        assert equal(one_process[case], result[case], 5e-3 if case == "bfloat16" else 2e-4), (
            one_process[case], result[case],
        )  # fmt: skip


def test_bfloat16_is_used(two_ranks):
    assert not equal(two_ranks[0]["variable lengths"]["logged"], two_ranks[0]["bfloat16"]["logged"], 1e-6)


def test_padded_batches_of_a_trainer_are_cut_by_tokens(tmp_path):
    """Training does not compute the padding; what is logged, evaluated and predicted is that of one process."""
    one = alone("hf_trainer.py", str(tmp_path / "one"), "8", "7", "padded")["padded"]
    settings = {"partitions": 2, "microbatches": 2, "trainer_tokens": "attention_mask"}
    whole = one.pop("positions")
    for result in split(2, "hf_trainer.py", str(tmp_path / "two"), "8", "7", "padded", **settings):
        assert result["padded"].pop("positions") < 0.75 * whole
        assert equal(one, result["padded"], 2e-4), (one, result["padded"])


@one_day_in(2)
def test_replicas_of_a_split_trainer_do_what_one_process_does(tmp_path):
    one = alone("hf_trainer.py", str(tmp_path / "one"), "4", "8", *REPLICATED)
    names = ["--device", "cpu", "--smdistributed", "--set", "partitions=2"]
    results = split(4, "hf_trainer.py", str(tmp_path / "four"), "2", "8", *REPLICATED, options=names)
    assert len(results) == 4
    for result in results:
        for case in REPLICATED:
            assert equal(one[case], result[case], 2e-4), (case, one[case], result[case])


def test_ranks_that_split_tensors_are_one_copy_to_a_trainer(tmp_path):
    """Two copies, each of two ranks that read the same batches."""
    cases = ["variable lengths", "accumulated", "best"]
    one = alone("hf_trainer.py", str(tmp_path / "one"), "4", "8", *cases)
    settings = {"partitions": 1, "tensor_parallel_degree": 2}
    for result in split(4, "hf_trainer.py", str(tmp_path / "four"), "2", "8", *cases, **settings):
        for case in cases:
            assert equal(one[case], result[case], 2e-4), (case, one[case], result[case])


def test_a_trainer_refuses_samples_of_each_rank_that_splits_tensors(tmp_path):
    settings = {"tensor_parallel_degree": 2, "prescaled_batch": False}
    with pytest.raises(AssertionError, match='write "prescaled_batch": true'):
        split(2, "hf_trainer.py", str(tmp_path), "4", "8", "variable lengths", **settings)


@one_day_in(2)
def test_sft_with_an_adapter_goes_on_where_it_was(tmp_path):
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    one = alone("hf_sft.py", str(tmp_path / "one"))
    for result in split(2, "hf_sft.py", str(tmp_path / "two")):
        assert equal(one, result, 2e-4), (one, result)
    for result in split(2, "hf_sft.py", str(tmp_path / "again"), str(tmp_path / "two" / "checkpoint-2")):
        kept = [entry[:3] for entry in result]
        assert equal([entry[:3] for entry in one], kept, 2e-4), (one, result)


LAYOUTS = {
    "one process": (1, {}),
    "partitions": (2, {"partitions": 2}),
    "tensors": (2, {"partitions": 1, "tensor_parallel_degree": 2}),
    "copies that share states": (4, {"partitions": 2, "shard_optimizer_state": True, "ddp": True}),
}


def in_layout(layout: str, *args: str) -> dict:
    ranks, settings = LAYOUTS[layout]
    if not settings:
        return alone("hf_layouts.py", *args)
    os.environ["REPLICAS"] = "2" if ranks == 4 else "1"
    try:
        return split(ranks, "hf_layouts.py", *args, **settings)[0]
    finally:
        del os.environ["REPLICAS"]


@pytest.mark.parametrize("saved", one_in(4, LAYOUTS))
def test_every_layout_goes_on_from_every_other(saved, tmp_path):
    """The whole state of the optimizer, in the plain Trainer, too."""
    through = in_layout("one process", str(tmp_path / "through"), "5")
    before = in_layout(saved, str(tmp_path / "saved"), "5")
    assert equal(through, before, 2e-4), (through, before)
    for layout in LAYOUTS:
        after = in_layout(layout, str(tmp_path / layout), "5", str(tmp_path / "saved" / "checkpoint-3"))
        assert after["steps"] == [5.0] and equal(through["logged"], after["logged"], 2e-4), (
            layout,
            through,
            after,
        )


def test_states_of_single_ranks_of_another_layout_are_refused(tmp_path):
    """As older saves have them."""
    in_layout("partitions", str(tmp_path / "saved"), "3")
    folder = tmp_path / "saved" / "checkpoint-3"
    for partition in range(3):
        (folder / f"optimizer.pt_{partition}_0").write_bytes((folder / "optimizer.pt").read_bytes())
    (folder / "optimizer.pt").unlink()
    with pytest.raises(AssertionError, match="shards of 3 partitions and 1 ranks"):
        in_layout("partitions", str(tmp_path / "two"), "4", str(folder))


@one_day_in(2)
def test_preferences_and_rewards_are_those_of_one_process(tmp_path):
    """Their losses join rows: pairs, a mean divergence of the batch."""
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    kinds = ["dpo", "dpo adapter", "dpo before", "reward", "reward adapter", "kto", "grpo", "grpo generating"]
    one = alone("hf_trl.py", str(tmp_path / "one"), *kinds)
    for result in split(2, "hf_trl.py", str(tmp_path / "two"), *kinds):
        assert equal(one, result, 2e-4), (one, result)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"fp16": True}, "fp16: use bf16=True"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"torch_compile": True}, "compile modules inside of it"),
        ({"optim": "adalomo"}, 'optim="adalomo": it changes weights in the backward pass'),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed: weft splits the model itself"),
    ],
)
def test_what_a_split_model_cannot_honour_is_refused_by_name(given, words, monkeypatch):
    class Arguments:
        accelerator_config, fp16, optim, world_size = None, False, "adamw_torch", 1

    monkeypatch.setattr(
        "weft.compat.modelparallel.session.state._cfg", type("Cfg", (), {"fp16": False, "inputs": "any"})()
    )
    monkeypatch.setattr("weft.session.current.is_initialized", lambda: True)
    for name, value in given.items():
        setattr(Arguments, name, value)
    with pytest.raises(ConfigError, match="do not fit a split model") as refusal:
        refuse(Arguments())
    assert words in str(refusal.value)


RANKS = """\
import torch
import weft.integrations.transformers

weft.integrations.transformers.enable(partitions=2)

from accelerate import Accelerator

import weft.torch as weft

one = Accelerator(cpu=True)
own = torch.tensor([1.0 + weft.dp_rank()])
sums = one.reduce(own).item(), one.reduce(own, "mean").item(), one.gather(own).tolist()
print("RESULT", [weft.rank(), one.is_main_process, one.num_processes, one.process_index, *sums])
"""


def test_accelerate_counts_replicas_and_one_rank_is_the_main_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS, encoding="utf-8")
    done = run_ranks(4, script, [], QUIET, timeout=200, launcher="weft").check()
    lines = sorted(line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line)
    assert lines == [f"[{rank}, {rank == 0}, 2, {rank // 2}, 3.0, 1.5, [1.0, 2.0]]" for rank in range(4)]


@one_day_in(2)
def test_an_adapter_with_a_module_that_is_trained_whole_goes_on_where_it_was(tmp_path):
    pytest.importorskip("peft")
    one = alone("hf_adapter.py", str(tmp_path / "one"))
    assert len(one) == 4
    for result in split(2, "hf_adapter.py", str(tmp_path / "two")):
        assert equal(one, result, 2e-4), (one, result)
    for result in split(2, "hf_adapter.py", str(tmp_path / "again"), str(tmp_path / "two" / "checkpoint-2")):
        assert equal(one, result, 2e-4), (one, result)


def test_examples_without_tensors_are_one_microbatch(monkeypatch):
    """Each of several would get all of them."""
    settings = SimpleNamespace(partitions=2, microbatches=4)
    monkeypatch.setattr("weft.torch.session.current.session", lambda: SimpleNamespace(settings=settings))
    monkeypatch.setattr(options, "_settings_with_choice", [])
    monkeypatch.setattr(options.state, "_launched", {"microbatches"})
    monkeypatch.setattr(options.state, "init", lambda given: vars(settings).update(given))
    examples = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(
        UsageError, match="GRPOTrainer gets batches of examples without tensors.*microbatches=1"
    ):
        options.check_microbatches("GRPOTrainer", examples)
    options.check_microbatches("Trainer", {"input_ids": torch.ones(4, 2)})
    assert settings.microbatches == 4
    options._choose(4)
    options.check_microbatches("GRPOTrainer", examples)
    assert settings.microbatches == 1


def test_each_microbatch_of_an_evaluation_has_its_own_items():
    class Trainer:
        def _get_num_items_in_batch(self, samples, device):
            return "counted"

    steps._count_once(Trainer)
    trainer, both, seen = Trainer(), threading.Barrier(2, timeout=30), {}

    def microbatch(items):
        with steps._inside(items):
            both.wait()  # both have begun
            seen[items] = trainer._get_num_items_in_batch([], None)
            both.wait()

    threads = [threading.Thread(target=microbatch, args=[items]) for items in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {3: 3, 5: 5} and trainer._get_num_items_in_batch([], None) == "counted"


def test_a_loss_of_the_scripts_own_over_other_numbers_of_labels_is_told(caplog):
    class Own(transformers.Trainer):
        def __init__(self):
            self.model = object()

        def compute_loss(self, *args, **kwargs):
            raise AssertionError

    made = steps._Steps(Own(), "")
    for labels in ([[1, 2], [3, 4]], [[1, -100], [3, 4]], [[1, -100], [-100, 4]]):
        made._count(None, {"labels": torch.tensor(labels)})
    (record,) = caplog.records
    assert "Own.compute_loss is the script's own" in record.getMessage()


@pytest.mark.parametrize(("tied", "way"), [(False, "delayed"), (True, "delayed"), (True, "large")])
def test_pretrained_weights_are_converted_by_who_owns_them(tmp_path, tied, way):
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=4096,
        tie_word_embeddings=tied,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    _read_by_parts(net, tmp_path / "language", way)


@pytest.mark.parametrize("way", ["delayed", "large"])
def test_pretrained_weights_of_diffusers_are_converted_by_who_owns_them(tmp_path, way):
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(128, 256), cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    _read_by_parts(net, tmp_path / "unet", way)


def _read_by_parts(net, folder, way):
    """Two ranks read what each owns, and train as one process does."""
    net.save_pretrained(folder)
    mib = sum(parameter.numel() for parameter in net.parameters()) * 8 / 2**20
    one = alone("hf_pretrained.py", str(folder), "plain")
    ranks = split(2, "hf_pretrained.py", str(folder), way)
    assert len(ranks) == 2 and one["grown"] > 0.9 * mib > 60
    for each in ranks:
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-9)
        assert each["grown"] < 0.3 * mib, "the model takes no memory before it is split"
