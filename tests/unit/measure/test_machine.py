"""From measured times to a machine's file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import FormatError
from weft.machines.machine_file import host_from_json, host_to_json
from weft.measure.machine import Measured, fit_line, host_of, measured_from_json

SIZES = (1e6, 1e7, 1e8, 1e9, 1e10)
H100 = [(2.0 * 2048**3, 2.481e-5), (2.0 * 4096**3, 1.962e-4), (2.0 * 8192**3, 1.582e-3)]
"""Products in bf16 as an H100 took them, PyTorch 2.11."""


@given(st.floats(1e6, 1e15), st.floats(0, 1e-2))
def test_a_line_is_found_again(rate: float, start: float):
    found = fit_line([(size, size / rate + start) for size in SIZES])
    assert found[0] == pytest.approx(rate, rel=1e-3) or start * rate > 1e3 * SIZES[-1]
    for size in SIZES:
        assert size / found[0] + found[1] == pytest.approx(size / rate + start, rel=1e-3)


def test_one_time_and_times_that_shrink_are_no_line_with_a_start():
    assert fit_line([(100.0, 2.0)]) == (50.0, 0.0)
    rate, start = fit_line([(1.0, 10.0), (100.0, 11.0)])
    assert rate > 0 and start >= 0
    rate, start = fit_line([(1.0, 0.01), (2.0, 4.0)])
    assert rate > 0 and start == 0.0, "a start is not negative"


def rank(factor: float = 1.0, sums: bool = True) -> Measured:
    def line(rate: float, start: float = 0.0) -> list[tuple[float, float]]:
        return [(size, factor * (size / rate + start)) for size in SIZES]

    return Measured(
        "made", 16 << 30, {"fp32": line(1e12, 1e-6), "bf16": H100}, line(1e11), line(2e11), line(3e14),
        *((line(1e9, 2e-5), line(5e8, 3e-4), line(1e9, 4e-5), line(4e8, 5e-5)) if sums else ()),
    )  # fmt: skip


def test_the_slowest_rank_counts_and_the_file_says_what_was_measured():
    host = host_of("here", [rank(), rank(2.0)], 64 << 30)
    device = host.accelerator
    assert host.accelerators == 2 and device.rate("fp32") == pytest.approx(5e11, rel=1e-3)
    assert 680e12 < device.rate("bf16") < 720e12
    assert device.half_flops < 2.0 * 1024**3, "products of a width of 1024 are over half as fast"
    assert device.move_s(1e9) == pytest.approx(0.02) and device.bytes_per_s == pytest.approx(1e11)
    # two ranks: 2 (n - 1) / n = 1, 2 (n - 1) = 2 latencies
    assert host.inside.bytes_per_s == pytest.approx(0.5e9, rel=1e-3)
    assert host.inside.latency_s == pytest.approx(2e-5, rel=1e-3)
    # three exchanges of a layer: 3 (n - 1) / n = 1.5, 3 (n - 1) = 3 latencies
    assert host.sharing is not None and host.sharing.bytes_per_s == pytest.approx(1.5 * 0.25e9, rel=1e-3)
    assert host.sharing.latency_s == pytest.approx(2 * 3e-4 / 3, rel=1e-3)
    # a sum of a cut layer is an all-reduce, whether it is handed out and gathered or not
    assert host.sums is not None and host.sums.bytes_per_s == pytest.approx(0.5e9, rel=1e-3)
    assert host.tokens is not None and host.tokens.bytes_per_s == pytest.approx(0.2e9, rel=1e-3)
    assert host.tokens.latency_s == pytest.approx(5e-5, rel=1e-3)
    assert (host.memory_bytes, host.price_per_hour) == (64 << 30, None)
    assert host_from_json(host_to_json(host)) == host


def test_one_rank_has_no_sums_and_a_rank_may_have_left_out_the_largest():
    alone = host_of("here", [rank(sums=False)], 1 << 30)
    assert alone.accelerators == 1 and (alone.sharing, alone.sums, alone.tokens) == (None, None, None)
    short = rank()
    short = Measured(**{**vars(short), "products": {"fp32": short.products["fp32"][:3], "bf16": H100}})
    assert host_of("here", [rank(), short], 1 << 30).accelerator.rate("fp32") == pytest.approx(1e12, rel=1e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"weft": "other"},
        {"products": {"fp32": [[1.0, 0.0]]}},
        {"products": {"fp32": [[1.0]]}},
        {"moves": [["a", 1.0]]},
        {"memory_bytes": "much"},
    ],
)
def test_what_a_rank_wrote_is_looked_at(change: dict[str, object]):
    good = {
        "weft": "measured machine", "version": 1, "device": "cpu:1", "memory_bytes": 1 << 30,
        "products": {"fp32": [[1e6, 1e-3]]}, "moves": [[1e6, 1e-3]], "copies": [[1e6, 1e-3]],
        "attention": [[1e6, 1e-3]], "sums": [],
    }  # fmt: skip
    assert measured_from_json(json.dumps(good)).products == {"fp32": [(1e6, 1e-3)]}
    with pytest.raises(FormatError):
        measured_from_json(json.dumps({**good, **change}))
