"""Which tensors cross, for programs whose crossings can be counted by hand."""

from __future__ import annotations

import torch

from weft.torch.trace.operations import Operations

SIZE = 4 * 8


def residual() -> Operations:
    """x = first(input); h = up(x); y = x + down(h), where the sum is glue; last(y)."""
    found = Operations()
    given, x, h, d, y, out = (torch.zeros(8) for _ in range(6))
    for module, operands, result in (
        ("first", [given], x), ("up", [x], h), ("down", [h], d), ("", [x, d], y), ("last", [y], out),
    ):  # fmt: skip
        found.note(module, operands, result)
    return found


HOME = {"first": 0, "up": 1, "down": 2, "last": 3}


def test_a_cut_between_blocks_sends_one_tensor_and_one_inside_a_block_two():
    operations = residual()
    assert operations.crossing(HOME, [0, 0, 0, 1]) == [SIZE]  # y
    assert operations.crossing(HOME, [0, 0, 1, 1]) == [SIZE, SIZE]  # h, and x for the sum
    assert operations.crossing(HOME, [0, 0, 0, 0]) == []


def test_cuts_of_all_places_at_once():
    operations = residual()
    found = operations.at_cuts(HOME, 4)
    assert found == [operations.crossing(HOME, [0] * cut + [1] * (4 - cut)) for cut in (1, 2, 3)]
    assert [len(sizes) for sizes in found] == [1, 2, 1]
    assert operations.at_cuts({"first": 0, "up": 0, "down": 0, "last": 0}, 1) == []


def test_a_tensor_goes_to_the_same_partition_once_and_to_each_of_several():
    operations = residual()
    assert operations.crossing(HOME, [0, 1, 1, 1]) == [SIZE]  # x, used by `up` and by the sum
    assert operations.crossing(HOME, [0, 1, 2, 2]) == [SIZE] * 3  # x to both, h


def test_what_depends_on_no_unit_crosses_nowhere():
    operations = Operations()
    mask, out = torch.zeros(8), torch.zeros(8)
    operations.note("", [], mask)
    operations.note("last", [mask], out)
    assert operations.crossing({"last": 0, "other": 1}, [1, 0]) == []


def test_tensors_of_an_earlier_trace_count_as_inputs():
    tensor = torch.zeros(8)
    residual().note("first", [], tensor)
    later = Operations()
    later.note("up", [tensor], torch.zeros(8))
    assert later.steps == [("up", (), SIZE)]
