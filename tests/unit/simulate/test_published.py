"""Bubble rates as published in "Zero Bubble Pipeline Parallelism", arXiv 2401.10241."""

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.schedule import make
from weft.simulate import Links, StageCost, simulate
from weft.topology.cluster import Link


class Row(NamedTuple):
    """One configuration: profiled times in seconds and published rates."""

    layers: int
    ranks: int
    microbatches: int
    forward_s: float
    input_s: float
    weight_s: float
    links: Links
    rates: dict[str, float]

    def cost(self, chunks=1):
        """What one of a rank's `chunks` stages costs."""
        times = (self.forward_s, self.input_s + self.weight_s, self.input_s, self.weight_s)
        return StageCost(*(time / chunks for time in times))

    def bubble_rate(self, schedule, chunks=1):
        """The simulated one."""
        made = make(schedule, self.ranks, self.microbatches, chunks=chunks)
        costs = [self.cost(chunks)] * (chunks * self.ranks)
        return simulate(made.ranks, made.rank_of_stage, costs, self.links).bubble_rate


def read():
    text = Path(__file__).with_name("zero_bubble.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        times = [float(row[name]) / 1e3 for name in ("F_ms", "B_ms", "W_ms")]
        links = Links.uniform(Link(float(row["comm_ms"]) / 1e3))
        rates = {name: float(row[f"bubble_{name}"]) for name in ("1f1b", "interleaved", "zb_h1")}
        yield (
            f"{row['model']}, {row['m']} microbatches",
            Row(int(row["layers"]), int(row["p"]), int(row["m"]), *times, links, rates),
        )


ROWS = dict(read())


@pytest.mark.parametrize("name", ROWS)
def test_1f1b(name):
    row = ROWS[name]
    assert round(row.bubble_rate("1f1b"), 4) == row.rates["1f1b"]


@pytest.mark.parametrize("name", ROWS)
def test_interleaved_stages(name):
    """One transformer layer a chunk; the head and the embedding count as one each."""
    row = ROWS[name]
    rate = row.bubble_rate("interleaved_1f1b", chunks=(row.layers + 2) // row.ranks)
    assert rate == pytest.approx(row.rates["interleaved"], abs=0.005)


@pytest.mark.parametrize("name", ROWS)
def test_zb_h1(name):
    row = ROWS[name]
    assert row.bubble_rate("zb_h1") <= row.rates["zb_h1"] + 0.005


def test_all_configurations_are_there():
    assert len(ROWS) == 12
