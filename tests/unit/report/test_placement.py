import json

import pytest

from weft.report.placement import ModelPlacement, Opening, PartitionReport
from weft.report.text import PlacementRow


def placement(*units, **others) -> ModelPlacement:
    return ModelPlacement(tuple(PlacementRow(*unit) for unit in units), 2, **{"microbatches": 4, **others})


EVEN = (("first", 0, 10, 40, 2.0, 4.0, 160), ("last", 1, 30, 120, 2.0, 3.5, 480))
SLOW = (("a", 0, 10, 40, 0.5, 0.5, 160), ("slow <b>", 1, 10, 40, 19.0, 18.0, 160))


def test_each_partition_has_its_share_of_time_and_of_memory():
    one, other = placement(*EVEN).shares
    assert (one.time_ms, other.time_ms) == (6.0, 5.5)
    assert one.time_share + other.time_share == pytest.approx(1) and one.time_share == pytest.approx(6 / 11.5)
    assert (one.memory_share, other.memory_share) == (0.25, 0.75)
    lines = str(placement(*EVEN)).splitlines()
    assert lines[-2].split() == ["0", "1", "10", "6.00", "52.2%", "##########..........", "160", "B", "25.0%"]
    assert "warning" not in str(placement(*EVEN))


@pytest.mark.parametrize(
    "optimize, remedy",
    [
        ("memory", 'optimize is "memory", which balances memory before time; set optimize=speed'),
        ("speed", "no split is even while it is one unit"),
        ("", "no split is even while it is one unit"),
    ],
)
def test_an_uneven_split_is_told_with_its_cause(optimize, remedy):
    (warning,) = placement(*SLOW, optimize=optimize).warnings
    assert warning.startswith("partition 1 takes 97% of the time, 37.0 times as much as partition 0")
    assert "slow <b> (37.0 ms, 97%)" in warning and remedy in warning


def test_units_that_the_script_placed_may_move():
    many = [(f"unit{n}", int(n > 0), 1, 4, 2.0, 2.0, 8) for n in range(6)]
    (warning,) = placement(*many).warnings
    assert "move units to other partitions, or set auto_partition=true" in warning


def test_what_is_hardly_measured_is_not_told():
    assert not placement(("a", 0, 1, 4, 0.1, 0.1, 8), ("b", 1, 1, 4, 0.5, 0.5, 8)).warnings


def test_a_partition_with_nothing_to_do():
    (warning,) = placement(("a", 0, 1, 4, 10.0, 10.0, 8)).warnings
    assert "and partition 1 has nothing to do" in warning


def test_one_microbatch_does_not_overlap():
    (warning,) = placement(*EVEN, microbatches=1).warnings
    assert warning.startswith("microbatches is 1") and "set microbatches to 4" in warning


def test_a_report_is_text_values_and_a_page():
    report = PartitionReport((placement(*SLOW), ModelPlacement((), 1)), "because <i>")
    assert str(report).endswith("one partition: the whole model on every rank\n\nbecause <i>")
    content = json.loads(json.dumps(report.to_dict()))
    first = content["models"][0]
    assert first["partitions"][1]["time_ms"] == 37.0 and first["units"][0]["unit"] == "a"
    assert first["warnings"] == report.warnings and len(report.warnings) == 1
    assert "<b>" not in report._repr_html_() and "slow &lt;b&gt;" in report._repr_html_()


def test_the_line_at_the_start_names_what_was_split_and_proved():
    split = "2 partitions of 1 and 1 units (52 % / 48 % of the time)"
    proof = "step 1 equals one process (0.48 s)"
    opening = Opening(proof=proof)
    opening.add("Net", placement(*EVEN))
    opening.add("whole", ModelPlacement(placement(*EVEN).units, 1))
    assert opening.text("1F1B", 4) == f"{split}, 1F1B, 4 microbatches; {proof}"
    opening.add("D\x1b", placement(*EVEN))
    ways = ["2 data-parallel replicas"]
    assert opening.text("ZBV", 4, ways) == (
        f"Net: {split}; D\\x1b: {split}, ZBV, 2 data-parallel replicas, 4 microbatches; {proof}"
    )
    assert (
        Opening().text("1F1B", 1, ["tensor parallel over 2 ranks"])
        == "tensor parallel over 2 ranks, 1 microbatch"
    )
