"""The benchmark's reader of published steps: precisions and sources that it knows, and others."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.plan.rows import read
from tests.unit.test_docs import ROOT


def changed(folder: Path, **values: str) -> Path:
    """A file with the first row of the test's data, changed."""
    with (ROOT / "tests" / "data" / "step_times.csv").open(encoding="utf-8") as file:
        row = next(csv.DictReader(file)) | values
    path = folder / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    return path


@pytest.mark.parametrize(
    ("written", "meant"), [("fp8-cs", "fp8"), ("fp8", "fp8"), ("fp16/bf16", "fp16"), ("bf16/fp32acc", "bf16")]
)
def test_a_precision_is_what_its_name_begins_with(written, meant, tmp_path):
    ((row,), left_out) = read(changed(tmp_path, prec=written, gpu="H100-80"))
    assert (row.job.precision, left_out) == (meant, 0)


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match='"int8" of korthikanti begins with none of fp16, bf16, fp8'):
        read(changed(tmp_path, prec="int8"))
    with pytest.raises(ValueError, match='what the code of "a blog" does'):
        read(changed(tmp_path, set="a blog"))
