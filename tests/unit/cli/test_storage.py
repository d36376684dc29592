"""`weft storage`: what it says of what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.cli.plan.storage import Measured, advice, as_text
from weft.measure.files import Held
from weft.measure.storage import Rate

MB, GB = 1e6, 1e9


def rate(readers: int, bytes_per_s: float, cached: float = 0.0, pattern: str = "whole files") -> Rate:
    return Rate(pattern, readers, cached, bytes_per_s, bytes_per_s / 1e5, 0.01, int(bytes_per_s), 1.0)


def found(
    *loader: Rate, need: float | None = None, row: float = 100 * MB, warm: float = 2 * GB, size: int = 10**5
):
    rates = [rate(1, row, pattern="in a row"), *loader, rate(loader[-1].readers, warm, cached=1.0)]
    return Measured("/data", [Held(f"/data/{n}", size) for n in range(1000)], rates, [], need, 8, 32 << 30)


def test_the_fewest_readers_that_give_the_most():
    measured = found(
        rate(1, 100 * MB), rate(2, 195 * MB), rate(4, 200 * MB), rate(8, 180 * MB), need=150 * MB
    )
    assert measured.best.readers == 2 and measured.serves
    assert any(line.startswith("num_workers=2 is enough") for line in advice(measured))
    assert "It gives 195 MB/s to 2 readers of this host, which needs 150 MB/s: enough." in as_text(measured)


def test_rates_that_still_rise_say_so():
    measured = found(rate(1, 100 * MB), rate(2, 200 * MB))
    assert "try --readers 4" in advice(measured)[0] and measured.serves is None
    assert "It gives 200 MB/s to 2 readers of this host." in as_text(measured)


def test_too_little_names_what_helps_and_what_would_be_large_enough():
    measured = found(rate(1, 20 * MB), rate(2, 20 * MB), need=1 * GB)
    text = as_text(measured)
    assert "2% of it" in text and "SCRATCH_2" in text
    assert re.search(r"EFS elastic +524 MB/s +524 MB/s +too little for a host", text)
    assert re.search(r"S3 +12.5 GB/s +12.5 GB/s +2 prefixes +12", text), (
        "files of 100 kB: 10,000 reads a second"
    )
    lines = advice(measured)
    assert any("5.0 times as fast: pack them into shards" in line for line in lines), (
        "small files, a fast disk"
    )
    assert any("fits into this host's memory (32 GiB), which gives 2 GB/s" in line for line in lines)
    few = found(rate(1, 20 * MB), need=1 * GB, warm=0.5 * GB, size=50 * 10**6)
    assert not any("shards" in line or "memory" in line for line in advice(few)), "large files, slow memory"


def test_prices_of_what_would_be_large_enough():
    prices = {"SCRATCH_2": {"gib_month": 0.1}, "S3": {"gib_month": 0.02}}
    short = found(rate(1, 20 * MB), need=1 * GB)
    text = as_text(short._replace(prices=prices))
    assert re.search(r"for each host that reads +smallest +a month", text)
    assert re.search(r"SCRATCH_2 +7,200 GiB +720", text)
    assert re.search(r"S3 .* 2 prefixes +12 +0.0019", text) and "SCRATCH_2 (gib_month 0.1)" in text
    assert "a month" not in as_text(short)


def test_what_was_in_memory_is_no_first_epoch():
    assert "--drop-cache" in advice(found(rate(1, 3 * GB, cached=0.9)))[0]
    assert "90% warm" in as_text(found(rate(1, 3 * GB, cached=0.9)))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1000))
    return tmp_path


def test_the_answer_of_the_command(data: Path, capsys):
    arguments = ["storage", str(data), "--seconds", "5", "--readers", "2", "--json"]
    assert main([*arguments, "--need", "1B/s"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["files"], answer["bytes"], answer["serves"]) == (20, 20_000, True)
    assert [one["readers"] for one in answer["rates"][:3]] == [1, 1, 2]
    assert main([*arguments, "--data", "100TB", "--epoch", "1s", "--hosts", "4"]) == 1
    assert json.loads(capsys.readouterr().out)["need_bytes_per_s"] == 25e12
    assert main([*arguments[:-1], "--record", "100B", "--write", "1MB"]) == 0
    assert "records" in capsys.readouterr().out and len(list(data.iterdir())) == 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--need", "3"], "is not a rate"),
        (["--data", "3GB"], "belong together"),
        (["--need", "1GB/s", "--data", "3GB", "--epoch", "3s"], "give one of them"),
        (["--hosts", "0"], "must be at least 1"),
        (["--seconds", "0"], "above 0"),
        (["--seconds", "nan"], "above 0"),
        (["--readers", "0"], "at least 1"),
        (["--record", "0B"], "at least 1"),
        (["--storage-price", "S4:gib_month=1"], '"S4" is no storage that is known'),
    ],
)
def test_mistakes_are_told(data: Path, capsys, options: list[str], said: str):
    assert main(["storage", str(data), *options]) == 2
    assert said in capsys.readouterr().err
