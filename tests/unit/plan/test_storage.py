"""File systems for a job's data: the example of the guides, and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.machines.storage_services import DEPLOYMENTS, GIB
from weft.plan.storage import file_system, need_bytes_per_s, smallest


def test_the_example_of_the_guides():
    """100 GB in 30 s on four nodes need about 3 GB/s. SCRATCH_2 gives 240 MB/s at 1.2 TiB; 2.4 GB/s at ten times that,
    with at least 67 GB in its cache, serve every epoch but the first."""
    assert need_bytes_per_s(100e9, 30) == pytest.approx(3.33e9, rel=0.01)
    assert file_system("SCRATCH_2", 1200, 100e9).first_bytes_per_s == pytest.approx(240e6)
    ten = file_system("SCRATCH_2", 12000, 100e9)
    assert ten.first_bytes_per_s == pytest.approx(2.4e9)
    assert ten.cache_bytes >= 67e9 and ten.later_s <= 30 < 100e9 / ten.first_bytes_per_s


@given(st.sampled_from(sorted(DEPLOYMENTS)), st.floats(1e6, 1e15), st.floats(0.1, 1e5), st.booleans())
def test_the_smallest_serves_and_the_next_smaller_does_not(name, data, epoch_s, first):
    def serves(capacity: int) -> bool:
        found = file_system(name, capacity, data)
        return (
            data / found.first_bytes_per_s if first else found.later_s
        ) <= epoch_s and capacity * GIB >= data

    found = smallest(name, data, epoch_s, first=first)
    assert serves(found.capacity_gib)
    smaller = found.capacity_gib - 2400 if found.capacity_gib > 2400 else 1200
    assert found.capacity_gib == 1200 or not serves(smaller)


def test_nothing_cannot_be_read():
    with pytest.raises(
        ConfigError, match="the data are 0 bytes and an epoch takes 3 s: both must be above 0"
    ):
        smallest("SCRATCH_2", 0, 3.0)
