"""The examples are those of the rank mapping that existing scripts rely on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config import PLACEMENTS
from weft.errors import ConfigError, UsageError
from weft.topology.mesh import Coordinates, Mesh


@pytest.mark.parametrize(
    ("placement", "mp", "dp"),
    [
        ("spread", ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("cluster", ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_eight_ranks_two_partitions(placement, mp, dp):
    mesh = Mesh(8, pp=2, placement=placement)
    assert mesh.groups("mp") == mesh.groups("pp") == mp
    assert mesh.groups("dp") == mesh.groups("rdp") == dp


@pytest.mark.parametrize(
    ("placement", "coordinates"),
    [
        ("DPT", "000 001 010 011 100 101 110 111"),
        ("PTD", "000 100 001 101 010 110 011 111"),
    ],
)
def test_eight_ranks_two_by_two_by_two(placement, coordinates):
    mesh = Mesh(8, pp=2, tp=2, placement=placement)
    assert ["".join(map(str, mesh.coordinates(rank))) for rank in range(8)] == coordinates.split()


def test_the_example_that_is_not_of_the_default_placement():
    """Four GPUs a copy, the partitions fastest: pp, tp and dp_rank, mp_rank of eight ranks."""
    mesh = Mesh(8, pp=2, tp=2, placement="DTP")
    assert [mesh.coordinates(rank)[1:] for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [mesh.position("dp", rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.position("mp", rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_that_read_the_same_samples_are_no_axis_of_other_ones(placement):
    apart, alike = (Mesh(8, pp=2, tp=2, placement=placement, alike=alike) for alike in (False, True))
    assert alike.groups("dp") == alike.groups("rdp") == apart.groups("rdp")
    assert apart.size("dp") == 4 and alike.size("dp") == 2
    assert [alike.groups(axis) for axis in ("pp", "tp", "mp")] == [
        apart.groups(axis) for axis in ("pp", "tp", "mp")
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_right_most_letter_varies_fastest(placement):
    """The rank is the number whose digits, from the left, are the coordinates that the letters name."""
    extent = {"D": 3, "P": 2, "T": 4}
    mesh = Mesh(24, pp=2, tp=4, placement=placement)
    for rank in range(24):
        here = mesh.coordinates(rank)
        digits = {"D": here.rdp, "P": here.pp, "T": here.tp}
        number = 0
        for letter in PLACEMENTS[placement]:
            number = number * extent[letter] + digits[letter]
        assert number == rank


def test_the_two_named_placements_as_formulas():
    cluster, spread = (Mesh(24, pp=2, tp=4, placement=name) for name in ("cluster", "spread"))
    for rank in range(24):
        here, there = cluster.coordinates(rank), spread.coordinates(rank)
        assert rank == (here.rdp * 2 + here.pp) * 4 + here.tp
        assert rank == (there.tp * 2 + there.pp) * 3 + there.rdp


def test_names_stand_for_letters():
    for rank in range(8):
        here = Coordinates(rdp=rank // 4, pp=rank // 2 % 2, tp=rank % 2)
        assert Mesh(8, 2, 2, "cluster").coordinates(rank) == Mesh(8, 2, 2, "DPT").coordinates(rank) == here
        assert Mesh(8, 2, 2, "spread").coordinates(rank) == Mesh(8, 2, 2, "TPD").coordinates(rank)


@st.composite
def meshes(draw):
    pp, tp, rdp = (draw(st.integers(1, 4)) for _ in range(3))
    return Mesh(pp * tp * rdp, pp, tp, draw(st.sampled_from(sorted(PLACEMENTS))))


@given(meshes())
def test_what_holds_for_every_mesh(mesh):
    size = mesh.size
    assert size("mp") * size("rdp") == size("pp") * size("dp") == mesh.world_size == size("world")
    assert (size("pp"), size("tp"), size("rdp")) == (mesh.pp, mesh.tp, mesh.rdp)
    for rank in range(mesh.world_size):
        assert mesh.rank_of(mesh.coordinates(rank)) == rank
        for axis in ("world", "pp", "tp", "rdp", "dp", "mp"):
            group = mesh.group(axis, rank)
            assert list(group) == sorted(group)
            assert group[mesh.position(axis, rank)] == rank
            assert group in mesh.groups(axis)
        assert set(mesh.group("tp", rank)) == set(mesh.group("dp", rank)) & set(mesh.group("mp", rank))
        assert mesh.position("pp", rank) == mesh.coordinates(rank).pp


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1), "world_size is 0, it must be at least 1"),
        ((4, 0, 0), "pp is 0, it must be at least 1; tp is 0"),
        ((4, 2, 1, "DD"), 'placement is "DD", it must be one of cluster, spread, DPT'),
        ((8, 3), r"8 ranks cannot be divided into copies of 3 \(pp 3 x tp 1\)"),
    ],
)
def test_faulty_meshes(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Mesh(*arguments)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda mesh: mesh.coordinates(4), "there is no rank 4 among 4 ranks"),
        (lambda mesh: mesh.rank_of(Coordinates(0, 2, 0)), "pp is 2, but the mesh has 2 there"),
        (lambda mesh: mesh.group("x", 0), 'there is no axis "x", write one of world, pp, tp, rdp, dp, mp'),
        (lambda mesh: mesh.groups("x"), 'there is no axis "x"'),
    ],
)
def test_faulty_questions(ask, text):
    with pytest.raises(UsageError, match=text):
        ask(Mesh(4, pp=2))
