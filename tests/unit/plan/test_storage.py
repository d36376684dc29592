"""File systems for a job's data: the example of the guides, and properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.machines.catalogue import INSTANCES
from weft.machines.storage import DEPLOYMENTS, GIB, SERVICES, Service
from weft.plan.storage import file_system, need_bytes_per_s, serving, smallest


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


NAMES = st.sampled_from(sorted(SERVICES))


@given(NAMES, st.floats(1e3, 1e12), st.integers(1, 100), st.floats(1e3, 1e9), st.floats(0, 1e14))
def test_what_is_named_serves_and_one_less_does_not(name, need, hosts, size, data):
    service = SERVICES[name]
    found = serving(service, need, hosts, read_bytes=size, data_bytes=data)
    gets = min(service.host, need / hosts), min(service.all, hosts * service.host, need)
    assert bool(found.lacks) is (gets != (need / hosts, need))
    if found.lacks:
        assert found.units == found.connections == 0
        return
    if service.unit[0]:
        of_each = min(service.each, service.reads * size)

        def enough(units: int) -> bool:
            return units * of_each >= need * (1 - 1e-9) and (units * GIB >= data or not service.stores)

        assert enough(found.units)
        assert found.units == 1 or not enough(found.units - 1)
    if service.connection < math.inf:
        assert found.connections * service.connection >= need / hosts * (1 - 1e-9)
        assert (found.connections - 1) * service.connection < need / hosts


@given(NAMES, st.floats(1e3, 1e11), st.floats(1, 10), st.integers(1, 100))
def test_more_need_never_takes_less(name, need, more, hosts):
    one, other = (serving(SERVICES[name], each, hosts) for each in (need, need * more))
    assert other.lacks or (one.units <= other.units and one.connections <= other.connections)


@pytest.mark.parametrize(
    ("name", "need", "units", "connections"),
    [
        ("EFS bursting", 150 * 2**20, 1024, 0),  # 150 KiB/s of reads for each GiB
        ("EFS provisioned", 300 * 2**20, 100, 0),
        ("EFS elastic", 300 * 2**20, 0, 0),
        ("S3", 1.25e9, 1, 15),  # 15 connections fill 10 Gbit/s, as the guide says
        ("Azure Blob", 12.5e9, 2, 199),
    ],
)
def test_the_figures_of_the_guides(name, need, units, connections):
    found = serving(SERVICES[name], need)
    assert (found.units, found.connections, found.lacks) == (units, connections, "")


def test_what_network_cards_do_not_carry():
    assert serving(SERVICES["GCS"], 2e9, 2, network_bytes_per_s=0.9e9).lacks == "a host"


def test_disks_of_instances():
    host = INSTANCES["p4d.24xlarge"]("p4d.24xlarge")
    assert (host.storage_bytes_per_s, host.storage_bytes, host.storage_assumed) == (16e9, 8 * 10**12, "")
    host = INSTANCES["p5.48xlarge"]("p5.48xlarge")
    assert host.storage_bytes == 8 * 3840 * 10**9 and host.storage_assumed


def test_nothing_serves_nothing():
    with pytest.raises(ConfigError, match="0 hosts need 1 bytes a second in reads of 8e\\+06 bytes"):
        serving(SERVICES["S3"], 1.0, hosts=0)
    with pytest.raises(ConfigError, match='service "x": reads is 0: each must be above 0'):
        Service("x", reads=0)
