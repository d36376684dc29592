import pytest

from weft.errors import ConfigError
from weft.graph.model import Graph, Unit
from weft.partition.cost import memory_bytes, unit_costs


def graph(*rows):
    return Graph(tuple(Unit(f"u{i}", *row) for i, row in enumerate(rows)))


def test_memory_counts_parameters_four_times_and_activations_once_a_microbatch():
    assert memory_bytes(Unit("u", 0, 0, 100, 10), in_flight=3) == 430


@pytest.mark.parametrize(
    ("weight", "expected"), [(1.0, [0.75, 0.25]), (0.0, [0.5, 0.5]), (0.5, [0.625, 0.375])]
)
def test_weight_moves_from_time_to_memory(weight, expected):
    assert unit_costs(graph((1, 2, 300, 0), (2, 1, 100, 0)), weight) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (((1, 0, 0, 0), (3, 0, 0, 0)), [0.25, 0.75]),
        (((0, 0, 1, 0), (0, 0, 3, 0)), [0.25, 0.75]),
        (((0, 0, 0, 0), (0, 0, 0, 0)), [0.5, 0.5]),
    ],
)
def test_totals_of_zero(rows, expected):
    assert unit_costs(graph(*rows), 0.8) == expected


def test_no_units():
    assert unit_costs(graph(), 0.8) == []


def test_weight_out_of_range():
    with pytest.raises(ConfigError, match=r"memory_weight is 1.5, it must be a number from 0 to 1"):
        unit_costs(graph(), 1.5)
