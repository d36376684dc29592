"""`weft plan`: what it prints is what the formulas say, and its mistakes are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import SOURCE
from tests.long import one_day_in
from weft.cli.main import main
from weft.cli.plan import measure as measuring
from weft.config import resolve
from weft.errors import WeftError
from weft.graph import Graph, Unit
from weft.machines.catalogue import host_of
from weft.machines.machine_file import host_from_json, host_to_json

SMALL = ["--layers", "4", "--hidden", "256", "--heads", "4", "--vocab", "1000", "--seq", "128"]
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def planned(capsys, *arguments: object, code: int = 0) -> dict:
    assert main(["plan", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys, *arguments: object, code: int = 0) -> str:
    assert main(["plan", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_70b_model_has_70b_parameters(llama, capsys):
    found = planned(
        capsys, "--cluster", "8x8xH100", "--config", llama, "--global-batch", 512, "--tokens", "300B"
    )
    assert round(found["parameters"] / 1e9, 1) == 70.6 and found["accelerators"] == 64
    steps = [plan["step_s"] for plan in found["best"]]
    assert steps == sorted(steps) and len(steps) == 10
    best = found["best"][0]
    assert best["tokens_per_s"] == pytest.approx(512 * 8192 / best["step_s"])
    assert best["hours"] == pytest.approx(300e9 / best["tokens_per_s"] / 3600)
    assert best["memory"]["sum"] == best["memory_bytes"] <= 0.96 * 80e9
    assert found["fits"] + found["too_large"] == found["tried"]
    assert found["nearest"]["lacks_bytes"] > 0


def test_terms_add_up(llama, capsys):
    found = planned(capsys, "--cluster", "16x8xA100-80", "--config", llama, "--global-batch", 256)
    for plan in found["best"]:
        step = plan["step"]
        parts = ("work", "bubble", "crossings", "replicas, exposed", "optimizer", "late ranks")
        assert step["step"] == pytest.approx(sum(step[part] for part in parts))
        assert step["work"] == pytest.approx(sum(step[part] for part in step if part.startswith("- ")))
        memory = plan["memory"]
        assert memory["sum"] == pytest.approx(sum(memory.values()) - memory["sum"])


def test_the_spread_stands_beside_each_answer_of_fitted_machines(llama, capsys):
    text = told(capsys, "--cluster", "16x8xA100-80", "--config", llama, "--global-batch", 256)
    (spread,) = re.findall(r"Published steps are [\d.]+ % off such plans .* peaks of memory [\d.]+ %", text)
    page = " ".join((SOURCE.parent / "docs" / "planning.md").read_text(encoding="utf-8").split())
    right = page[page.index("### How right it is") : page.index("From Python:")]
    assert all(figure in right for figure in re.findall(r"\d[\d.]* %", spread))
    assumed = told(capsys, "--cluster", "2xH200", *SMALL, "--global-batch", 64)
    assert "Published steps" not in assumed and "assumed, not fitted" in assumed


def test_what_is_shared_is_said_where_it_is(capsys):
    text = told(capsys, "--cluster", "2xH100", *SMALL, "--global-batch", 64, "--explain")
    assert re.search(r"Best of \d+ divisions: data 2, sharded optimizer", text)
    assert re.search(r"optimizer states .* for each parameter, shared by 2 ranks\n", text)
    assert re.search(r"parameters .* 2 bytes each\n", text) and re.search(
        r"gradients .* 4 bytes each\n", text
    )


def test_what_weft_runs_today_is_settings_that_weft_takes(llama, capsys):
    for cluster in ("8x8xH100", "4x8xA100-80", "64x8xH200"):
        found = planned(capsys, "--cluster", cluster, "--config", llama, "--global-batch", 512)
        plan = found["runs_today"]
        settings = resolve(plan["settings"], world_size=found["accelerators"])
        assert settings.partitions == plan["division"]["pipeline"]
        assert settings.tensor_parallel_degree == plan["division"]["tensor"] and not plan["weft_cannot"]


def test_the_text_has_a_sentence_a_table_and_a_command(llama, capsys):
    text = told(
        capsys, "--cluster", "8x8xH100", "--config", llama, "--global-batch", 512, "--tokens", "300B", "--price", 30,
        "--compare", "--explain",
    )  # fmt: skip
    assert re.search(
        r"Best of \d+ divisions: data 4, .* A step takes [\d.]+ s, [\d,]+ tokens/s, \d\d% of the peak", text
    )
    assert re.search(
        r"weft run -n 64 .*--set tensor_parallel_degree=\d --set sequence_parallel=true .*train.py", text
    )
    assert "weft cannot run the best one" not in text
    assert "do not fit into 71.5 GiB; the nearest lacks" in text
    assert re.search(r"What to try.*1 +64 replicas.*2 +one sequence at a time.*no", text, re.DOTALL)
    assert re.search(r"bubble +[\d.]+ ms +zb", text) and re.search(r"optimizer states .*12 bytes", text)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--precision", "fp8"], "products in fp8 are not in weft"),
        (["--lora", "8", "--quantized", "4"], "linears of 4 bits were not tried with weft"),
    ],
)
def test_a_plan_that_weft_cannot_run_says_so(capsys, options, why):
    sizes = "--layers 4 --hidden 512 --heads 8 --ffn 2048 --vocab 1000 --seq 128 --global-batch 8".split()
    assert main(["plan", "--cluster", "1x2xH100", *sizes, *options]) == 0
    text = capsys.readouterr().out
    assert f"weft runs none of these today: {why}" in text and "weft run " not in text


def test_cost_is_left_out_without_a_price(llama, capsys):
    asked = ("--cluster", "8x8xH100", "--config", llama, "--global-batch", 512, "--tokens", "1B")
    assert "cost" not in told(capsys, *asked)
    found = planned(capsys, *asked, "--price", 10)
    assert found["best"][0]["cost"] == pytest.approx(found["best"][0]["hours"] * 80)


def test_where_nothing_fits_one_sentence_says_what_is_lacking(llama, capsys):
    text = told(capsys, "--cluster", "8xA100-40", "--config", llama, "--global-batch", 64, code=2)
    sentence = next(line for line in text.splitlines() if "nothing fits" in line)
    assert "parameters, gradients and optimizer states alone take" in sentence
    assert re.search(
        r"a rank has 35\.8 GiB: it lacks \d+ GiB\. What would fit, by itself: .*--lora 16 .*B200 in place",
        sentence,
    )
    assert sentence.endswith("5 such hosts would do, with a batch of 80.")
    assert "weft run" not in text


def test_the_guide_keeps_to_the_memory_that_may_be_used(capsys):
    asked = ("--cluster", "8xH100", *SMALL, "--global-batch", 64)
    plenty = planned(capsys, *asked)["guide"]
    assert plenty[0]["fits"]
    scarce = planned(capsys, *asked, "--memory", f"{plenty[0]['memory_bytes'] - 1e6:.0f}B")["guide"]
    assert scarce[0]["memory_bytes"] == plenty[0]["memory_bytes"] and not scarce[0]["fits"]


def test_storage_of_the_example(capsys):
    """100 GB in 30 s on four hosts: 3.3 GB/s."""
    asked = ("--cluster", "4xp4d.24xlarge", *SMALL, "--global-batch", 64)
    text = told(capsys, *asked, "--data", "100GB", "--epoch", "30s")
    assert "Storage: 3.33 GB/s in all, 0.833 GB/s for each host" in text
    assert re.search(r"SCRATCH_2 +16,800 GiB +9,600 GiB", text)
    assert "disks of the hosts: 64 GB/s as was given, enough" in text, (
        "8 disks that give 16 GB/s, in each host"
    )
    assert "all of the data fits on each host" in text
    assert re.search(r"EFS bursting +524 MB/s +2.1 GB/s +too little for a host", text)
    assert re.search(r"S3 +12.5 GB/s +50 GB/s +1 prefix +10", text), (
        "833 MB/s a host, by connections of 85 MB/s"
    )
    assert "GCS (a connection and the whole)" in text
    found = planned(capsys, *asked, "--data", "100GB", "--epoch", "300s")["storage_services"]
    assert {one["name"]: one["units"] for one in found}["EFS bursting"] == 2171, (
        "GiB that give 333 MB/s of reads"
    )


def test_disks_that_are_assumed_say_so(capsys):
    asked = ("--cluster", "1xp5.48xlarge", *SMALL, "--global-batch", 64, "--data", "100TB", "--epoch", "1h")
    text = told(capsys, *asked)
    assert "16 GB/s with the rate of its disks assumed, too little" in text
    assert "not even a host's share of the data fits there" in text


def test_storage_beside_hosts_whose_memory_is_not_known(capsys):
    asked = ("--cluster", "4x8xA100-40", *SMALL, "--global-batch", 64)
    text = told(capsys, *asked, "--data", "100GB", "--epoch", "30s")
    assert "whether it fits into the hosts' memory is not known: name an instance type" in text


@pytest.mark.parametrize(("cluster", "said"), [("8xH200", True), ("8xH100", False), ("2xcpu:8", True)])
def test_machines_that_were_not_fitted_are_named(cluster, said, capsys):
    text = told(capsys, "--cluster", cluster, *SMALL, "--global-batch", 64)
    line = r"assumed, not fitted: (all shares|shares of H100); compare these times, do not rely on them"
    assert bool(re.search(line, text)) is said
    found = planned(capsys, "--cluster", cluster, *SMALL, "--global-batch", 64)
    assert bool(found["not_fitted"]) is said


def test_machine_files(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(host_to_json(host_of("L4", 4)))
    found = planned(capsys, "--cluster", f"2x{path}", *SMALL, "--global-batch", 64)
    assert found["accelerators"] == 8


def test_ten_thousand_accelerators(capsys):
    """1,000 layers on 10,000 GPUs: all divisions are tried, far within ten seconds."""
    found = planned(
        capsys, "--cluster", "1250x8xH100", "--layers", 1000, "--hidden", 12288, "--heads", 96, "--vocab", 50000,
        "--seq", 2048, "--global-batch", 10000,
    )  # fmt: skip
    assert found["tried"] > 1000 and found["best"]


def test_a_traced_model(tmp_path, capsys):
    path = tmp_path / "eight.graph.json"
    path.write_text(Graph(Unit(f"u{i}", 10.0, 20.0, 2**28, 2**20, 2**20) for i in range(8)).to_json())
    asked = (path, "--cluster", "4xT4", "--global-batch", 16)
    text = told(capsys, *asked)
    assert re.search(r"Best of \d+ divisions: data 1, pipeline 4, zb_h1, .*, 16 microbatches a replica", text)
    assert "weft run -n 4 --set partitions=4 --set microbatches=16 --set pipeline=zb_h1 train.py" in text
    assert planned(capsys, *asked)[0]["division"]["pipeline"] == 4
    refused = told(capsys, *asked, "--memory", "2GiB", code=2)
    assert "nothing fits: parameters, gradients and optimizer states alone take 2 GiB a rank" in refused


def test_a_page(llama, tmp_path, capsys):
    """Beside tables, beside JSON, and where nothing fits."""
    out = tmp_path / "plan.html"
    asked = ("--config", llama, "--global-batch", 512, "--html", out)
    text = told(capsys, "--cluster", "8x8xH100", *asked)
    assert "Best of" in text and f"wrote {out}: " in text
    assert re.search("<h1>70.6 billion parameters.*Best of .*weft run -n 64", out.read_text(), re.DOTALL)
    found = planned(capsys, "--cluster", "8xH100", *asked, code=2)
    assert not found["best"] and "Nothing fits: parameters" in out.read_text()
    refused = told(capsys, "--cluster", "8x8xH100", *asked[:-1], tmp_path / "none" / "plan.html", code=2)
    assert "cannot be written: No such file or directory" in refused


def test_a_page_of_a_traced_model(tmp_path, capsys):
    path, out = tmp_path / "eight.graph.json", tmp_path / "plan.html"
    path.write_text(Graph(Unit(f"u{i}", 10.0, 20.0, 2**28, 2**20, 2**20) for i in range(8)).to_json())
    asked = (path, "--cluster", "4xT4", "--global-batch", 16, "--html", out)
    (best, *_) = planned(capsys, *asked)
    page = out.read_text()
    assert "<h1>8 units, 2 GiB of parameters, on 4 x T4, 1 host</h1>" in page
    assert page.count('class="bar lane"') == best["division"]["pipeline"] == 4
    assert "16 microbatches like the one that was traced" in page


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            ["--cluster", "8xT4", *SMALL, "--global-batch", "8", "--precision", "bf16"],
            "T4 has no products in bf16: write",
        ),
        (
            ["--cluster", "8xT4", "--layers", "4", "--global-batch", "8"],
            "the model lacks --hidden, --heads, --vocab, --seq",
        ),
        (
            ["--cluster", "8xT4", *SMALL, "--global-batch", "8", "--data", "1GB"],
            "--data and --epoch belong together",
        ),
        (
            ["--cluster", "8xT4", *SMALL, "--global-batch", "8", "--data", "1GB", "--epoch", "0s"],
            "both must be above 0",
        ),
        (
            ["--cluster", "7xT4", *SMALL, "--global-batch", "8"],
            "7 accelerators cannot divide this job .* for example 14",
        ),
        (["--cluster", "8xT4", *SMALL, "--global-batch", "8", "--price", "-1"], "costs -1.0 an hour"),
        (["--cluster", "8xT4", "--config", "nowhere.json", "--global-batch", "8"], "nowhere.json"),
        (
            [
                "g.json",
                "--cluster",
                "8xT4",
                "--global-batch",
                "8",
                "--layers",
                "4",
                "--tokens",
                "3B",
                "--explain",
            ],
            "g.json is a traced model, of which --layers, --tokens, --explain can say nothing: leave them out",
        ),
    ],
)
def test_mistakes(arguments, fault, capsys):
    assert re.search(fault, told(capsys, *arguments, code=2))


def test_numbers_are_whole(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--cluster", "8xT4", *SMALL, "--global-batch", "1.5B"])
    assert "'1.5B' is no whole number above 0, such as 2048 or 300B" in capsys.readouterr().err


@one_day_in(4)
@pytest.mark.timeout(300)
def test_a_machine_is_measured_and_planned_for(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    path = tmp_path / "mine.json"
    assert main(["plan", "--measure", str(path), "-n", "2"]) == 0
    assert "mine.json: 2 x cpu:1 (measured), each " in capsys.readouterr().out
    host = host_from_json(path.read_text())
    assert host.accelerators == 2 and host.inside.bytes_per_s > 1e6 and host.accelerator.rate("fp32") > 1e8
    assert host.sharing is not None and host.price_per_hour is None and host.memory_bytes > 1 << 30
    plan = planned(capsys, *SMALL, "--cluster", f"1x{path}", "--global-batch", 16)
    assert plan["best"] and all(one["step_s"] > 0 for one in plan["best"])


@pytest.mark.parametrize("options", [[], ["--cluster", "8xH100"], ["--global-batch", "8"]])
def test_a_plan_needs_machines_and_a_batch(capsys, options: list[str]):
    assert "a plan needs --" in told(capsys, *SMALL, *options, code=2)


def test_a_measurement_that_takes_too_long_or_has_no_ranks_is_told(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS", 0.01)
    path = tmp_path / "mine.json"
    assert "took more than 0.01 s" in told(capsys, "--measure", path, code=2)
    assert "--ranks is 0, it must be at least 1" in told(capsys, "--measure", path, "-n", 0, code=2)
    assert not path.exists()
    plan = [*SMALL, "--cluster", "1x8xH100", "--global-batch", 8]
    assert "a plan takes its ranks from --cluster" in told(capsys, *plan, "-n", 4, code=2)


MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def test_a_mixture_of_experts(tmp_path, capsys):
    """By its file and by options: the same plan; all parameters and those that a token meets."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    training = ("--cluster", "4x8xA100-80", "--seq", 4096, "--global-batch", 256)
    by_file = planned(capsys, *training, "--config", path)
    assert [round(by_file[name] / 1e9, 1) for name in ("parameters", "active_parameters")] == [46.7, 12.9]
    sizes = (
        "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 32000 --gated --untied".split()
    )
    experts = ("--experts", 8, "--experts-per-token", 2)
    assert planned(capsys, *training, *sizes, *experts) == by_file
    assert by_file["best"][0]["division"]["experts"] > 1
    assert by_file["best"][0]["weft_cannot"] == ""
    out = told(capsys, *training, "--config", path, "--explain")
    assert (
        "46.7 billion parameters, of which a token meets 12.9 billion (2 of 8 experts), 256 sequences" in out
    )
    assert "assumed, not fitted: all that experts take" in out and "- all-to-all of experts" in out
    wider = planned(
        capsys, *training, *sizes, *experts, "--expert-ffn", 7168, "--shared-ffn", 0, "--dense-layers", 0
    )
    assert wider["parameters"] < by_file["parameters"]


def test_a_mixture_of_experts_that_is_not_told_in_full(capsys):
    training = ("--cluster", "8xT4", *SMALL, "--global-batch", 8)
    assert "lacks --experts-per-token: --experts 8 --experts-per-token 2" in told(
        capsys, *training, "--experts", 8, code=2
    )
    assert "lacks --experts and --experts-per-token" in told(capsys, *training, "--shared-ffn", 64, code=2)


def test_storage_by_its_rate(tmp_path, capsys):
    """A rate that was given is held against the need."""
    given = json.loads(host_to_json(host_of("L4", 4))) | {"storage": "7GB/s"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(given))
    asked = ("--cluster", f"4x{path}", *SMALL, "--global-batch", 64, "--data", "100GB", "--epoch", "30s")
    text = told(capsys, *asked, "--storage-rate", "3GB/s")
    assert "--storage-rate: 3 GB/s as was given, too little; an epoch takes 33.3 s to read" in text
    assert "disks of the hosts: 28 GB/s as was given, enough; an epoch takes 3.57 s to read" in text
    assert "SCRATCH_2" in text
    found = planned(capsys, *asked)["storage_given"]
    assert [(one["name"], one["serves"]) for one in found] == [("disks of the hosts", True)]
    assert host_from_json(host_to_json(host_from_json(path.read_text()))).storage_bytes_per_s == 7e9


def test_figures_of_services_by_a_machine_file(tmp_path, capsys):
    """What somebody knows of a service counts instead of weft's figure, and is not assumed any more."""
    known = {"GCS": {"connection": "60MB/s", "all": "25GB/s"}, "S3": {"reads": 11000}}
    text = json.dumps(json.loads(host_to_json(host_of("L4", 4))) | {"services": known, "storage_size": "2TB"})
    host = host_from_json(text)
    assert host.services["GCS"].connection == 60e6 and host.services["GCS"].assumed == ()
    assert host.services["S3"].reads == 11000 and host.storage_bytes == 2 * 10**12
    assert host_from_json(host_to_json(host)) == host
    path = tmp_path / "mine.json"
    path.write_text(text)
    asked = ("--cluster", f"4x{path}", *SMALL, "--global-batch", 64, "--data", "100GB", "--epoch", "300s")
    found = {one["name"]: one for one in planned(capsys, *asked)["storage_services"]}
    assert found["GCS"]["connections"] == 2 and found["GCS"]["assumed"] == []
    for wrong in ({"GCP": {}}, {"GCS": {"speed": 3}}, {"GCS": {"all": "0GB/s"}}):
        with pytest.raises(WeftError, match="GC"):
            host_from_json(json.dumps(json.loads(text) | {"services": wrong}))


def test_prices_of_storage_by_a_machine_file_and_by_the_option(tmp_path, capsys):
    """The option wins; columns are there for what has a price, and the run has its share of a month."""
    prices = {"SCRATCH_2": {"gib_month": 0.1}, "S3": {"gib_month": 0.02}}
    text = json.dumps(json.loads(host_to_json(host_of("L4", 4))) | {"storage_prices": prices})
    host = host_from_json(text)
    assert host.storage_prices == prices and host_from_json(host_to_json(host)) == host
    path = tmp_path / "mine.json"
    path.write_text(text)
    need = ("--data", "100GB", "--epoch", "300s")
    asked = ("--cluster", f"4x{path}", *SMALL, "--global-batch", 64, *need)
    option = ("--storage-price", "S3:gib_month=0.04", "--storage-price", "S3:thousand_reads=0.4")
    seen = told(capsys, *asked, *option)
    assert re.search(r"FSx for Lustre +first epoch, too +a month +later epochs +a month +of them", seen)
    assert re.search(r"SCRATCH_2 +2,400 GiB +240 +2,400 GiB +240 ", seen)
    assert re.search(r"PERSISTENT-125 +[\d,]+ GiB {12,}[\d,]+ GiB {12,}\d", seen), "it has no price"
    assert re.search(r"S3 .* 1 prefix +1 +3.73 +5\n", seen), "93 GiB; 12,500 requests"
    assert "S3 (gib_month 0.04, thousand_reads 0.4)" in seen and "the run" not in seen
    found = planned(capsys, *asked, "--tokens", "10B")
    hours = found["best"][0]["hours"]
    assert found["storage"][0]["first"]["bill"] == {
        "month": pytest.approx(240), "epoch": 0.0, "run": pytest.approx(240 * hours / 730)
    }  # fmt: skip
    bills = {one["name"]: one["bill"] for one in found["storage_services"]}
    assert bills["GCS"] is None and bills["S3"]["month"] == pytest.approx(100e9 / 2**30 * 0.02)
    without = told(capsys, "--cluster", "4x4xL4", *SMALL, "--global-batch", 64, *need)
    assert "a month" not in without and "prices" not in without
    for wrong, said in (
        ({"S4": {}}, "S4"),
        ({"S3": {"gib_moth": 1}}, r"\$.storage_prices.S3: \"gib_moth\" is unknown here; known are gib_month"),
        ({"S3": {"gib_month": -1}}, "gib_month of S3 is -1.0"),
        ({"S3": {"gib_month": "0.02"}}, "expected a number"),
    ):
        with pytest.raises(WeftError, match=said):
            host_from_json(json.dumps(json.loads(text) | {"storage_prices": wrong}))
    lone = ("--cluster", "8xT4", *SMALL, "--global-batch", 8, "--storage-price")
    assert "how much is needed say --data and --epoch" in told(capsys, *lone, "S3:gib_month=1", code=2)
    assert "gib_month of S3 is nan" in told(capsys, *lone, "S3:gib_month=nan", *need, code=2)


def test_a_rate_of_storage_that_says_nothing(capsys):
    asked = ("--cluster", "8xT4", *SMALL, "--global-batch", 8, "--storage-rate")
    assert "what it must give say --data and --epoch" in told(capsys, *asked, "3GB/s", code=2)
    need = ("--data", "1GB", "--epoch", "3s")
    assert "--storage-rate is 0GB/s, it must be above 0" in told(capsys, *asked, "0GB/s", *need, code=2)


def test_a_traced_model_that_fits_with_checkpoints_only(tmp_path, capsys):
    path = tmp_path / "eight.graph.json"
    path.write_text(Graph(Unit(f"layers.{i}", 10.0, 20.0, 2**20, 2**30, 2**20) for i in range(8)).to_json())
    asked = (path, "--cluster", "4xT4", "--global-batch", 16, "--memory")
    assert "with activation checkpoints around every block" in told(capsys, *asked, "4GiB")
    assert "checkpoints" not in told(capsys, *asked, "100GiB")
