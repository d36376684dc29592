import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulate.cases import rows
from weft.schedule import make
from weft.simulate import StageCost, peak_bytes, simulate

COST = StageCost(1.0, 2.0, 1.0, 1.0, activation_bytes=10, weight_bytes=4, parameter_bytes=100)


@given(st.integers(1, 6), st.integers(1, 9))
def test_1f1b_keeps_fewer_microbatches_on_later_ranks(stages, microbatches):
    actions = make("1f1b", stages, microbatches).ranks
    expected = tuple(400 + 10 * min(stages - rank, microbatches) for rank in range(stages))
    assert peak_bytes(actions, range(stages), [COST] * stages) == expected
    assert simulate(actions, range(stages), [COST] * stages).peak_bytes == expected


def test_simple_keeps_all():
    actions = make("gpipe", 2, 7).ranks
    assert simulate(actions, [0, 1], [COST] * 2, copies=2).peak_bytes == (270, 270)


@pytest.mark.parametrize(
    ("row", "kept"),
    [("0F0 0I0 0F1 0I1 0W0 0W1", 14), ("0F0 0I0 0W0 0F1 0I1 0W1", 10), ("0F0 0F1 0B0 0I1 0W1", 20)],
)
def test_what_waits_for_its_weight_pass_stays(row, kept):
    assert peak_bytes(rows(row), [0], [COST], copies=0) == (kept,)


def test_several_stages_of_a_rank_add_up():
    costs = [StageCost(activation_bytes=size, parameter_bytes=size) for size in (1, 20, 300)]
    actions = rows("0F0 2F0 2B0 0B0", "1F0 1B0")
    assert peak_bytes(actions, [0, 1, 0], costs, copies=1) == (602, 40)


def test_what_is_computed_anew_counts_while_a_backward_runs():
    cost = StageCost(activation_bytes=10, weight_bytes=40, transient_bytes=90)
    assert peak_bytes(rows("0F0 0B0"), [0], [cost]) == (100,)
    assert peak_bytes(rows("0F0 0F1 0B0 0B1"), [0], [cost]) == (110,)
    assert peak_bytes(rows("0F0 0F1 0I0 0I1 0W0 0W1"), [0], [cost]) == (140,), "W(0) waits while I(1) runs"


@pytest.mark.parametrize(("offloads", "held", "peaks"), [
    (False, 0, (4 * 2 + 30, 4 * 3 + 20 + 7)),  # three microbatches on the first rank; one and what is computed anew
    (False, 2, (4 * 2 + 20, 4 * 3 + 40 + 7)),  # they come back
    (True, 0, (4 * 2 + 20, 4 * 3 + 20 + 7)),  # the one that runs, and the next; the last rank waits for none
])  # fmt: skip
def test_what_waits_elsewhere_and_what_comes_back(offloads: bool, held: int, peaks: tuple[int, int]):
    actions = rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    costs = [
        StageCost(1.0, 1.0, activation_bytes=10, parameter_bytes=2),
        StageCost(1.0, 1.0, activation_bytes=20, parameter_bytes=3, transient_bytes=7),
    ]
    assert peak_bytes(actions, (0, 1), costs, offloads=offloads, held=held) == peaks
