"""Accelerators, hosts, the ways to name them, and the file format."""

from __future__ import annotations

import json

import pytest

from weft.errors import ConfigError, FormatError
from weft.machines.accelerator import Accelerator
from weft.machines.catalogue import ACCELERATORS, INSTANCES, host_of, not_fitted
from weft.machines.cluster import parse_cluster
from weft.machines.host import Conduct, Host, Machines
from weft.machines.machine_file import host_from_json, host_to_json
from weft.topology.cluster import Link

PLAIN = {"name": "X", "memory": "1GB", "bandwidth": "1GB/s", "peak": {"bf16": 1}}


def test_accelerators_that_were_not_fitted_say_so():
    fitted = {name for name, device in ACCELERATORS.items() if not not_fitted(device, "bf16")}
    assert fitted == {"A100-40", "A100-80", "H100", "H100-96-500W"}
    assert not_fitted(host_of("cpu:8").accelerator, "fp32") == "all shares"
    assert not_fitted(ACCELERATORS["A100-80"], "fp32") == "the share of products in fp32"


def test_shares_that_a_file_leaves_out_are_assumed():
    """And those that it has are not; nor is the file's own word on them lost."""
    given = json.loads(host_to_json(host_of("H100")))
    assert (
        "assumed" not in given["accelerator"] and host_from_json(json.dumps(given)).accelerator.assumed == ""
    )
    least = host_from_json(json.dumps({**given, "accelerator": PLAIN})).accelerator
    missing = "the share of products in bf16, half_flops, memory_share, attention_share"
    assert not_fitted(least, "bf16") == missing
    told = {**given["accelerator"], "assumed": "shares of another"}
    assert (
        host_from_json(json.dumps({**given, "accelerator": told})).accelerator.assumed == "shares of another"
    )


@pytest.mark.parametrize("name", [*ACCELERATORS, "cpu:8"])
def test_files_give_back_what_was_written(name):
    host = host_of(name, 4)
    assert host_from_json(host_to_json(host)) == host


@pytest.mark.parametrize("name", INSTANCES)
def test_instances_have_no_price_of_their_own(name):
    machines = parse_cluster(f"3x{name}")
    assert machines.hosts == 3 and machines.price_per_hour is None
    assert machines.host.memory_bytes


def test_products_reach_more_of_the_peak_the_larger_they_are():
    device = ACCELERATORS["A100-80"]
    shares = [device.share_of_peak(flops, "bf16") for flops in (1e8, 1e9, 1e10, 1e12)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] == pytest.approx(0.83, rel=0.01)


@pytest.mark.parametrize(
    ("text", "hosts", "each", "name"),
    [
        ("4x8xA100-80", 4, 8, "A100-80"),
        ("8xa100", 1, 8, "A100-80"),
        ("T4", 1, 1, "T4"),
        ("2xp4d.24xlarge", 2, 8, "A100-40"),
        ("Standard_ND96isr_H100_v5", 1, 8, "H100"),
        ("2x2xcpu:4", 2, 2, "cpu:4"),
        ("3xmine.json", 3, 4, "L4"),
    ],
)
def test_clusters_by_name(text, hosts, each, name):
    found = parse_cluster(text, lambda path: host_of("L4", 4))
    assert (found.hosts, found.host.accelerators, found.host.accelerator.name) == (hosts, each, name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4x8xA1000", 'there is no accelerator "A1000": write one of V100-16'),
        ("2x8xp4d.24xlarge", "counts accelerators twice: .* has 8, write for example 2xp4d.24xlarge"),
        ("999999x8xT4", "has 7999992 accelerators: give up to 1000000"),
        ("cpu:0", "there is no accelerator"),
    ],
)
def test_clusters_that_cannot_be(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_cluster(text)


def test_a_ring_takes_the_slowest_link():
    """Of eight ranks of a host all eight network cards carry the ring; of one rank a host, one does."""
    host = Host("h", ACCELERATORS["H100"], 8, Link(1e-6, 400e9), Link(1e-5, 40e9), conduct=Conduct(ring=0.5))
    machines = Machines(host, 4)
    assert machines.ring(8, 1) == host.inside
    assert machines.ring(32, 1).bytes_per_s == 8 * 20e9
    assert machines.ring(4, 8).bytes_per_s == 20e9
    assert machines.ring(16, 2).bytes_per_s == 4 * 20e9


def test_parameters_are_shared_over_the_fast_link_inside_of_a_host_only():
    """Ranks that are eight apart are on as many hosts, however few they are."""
    fast = Link(1e-6, 500e9)
    host = Host("h", ACCELERATORS["H100"], 8, Link(1e-6, 400e9), Link(1e-5, 40e9), sharing=fast)
    machines = Machines(host, 4)
    assert machines.sharing_ring(8, 1) == machines.sharing_ring(4, 2) == fast
    for ranks, stride in ((4, 8), (8, 2), (32, 1)):
        assert machines.sharing_ring(ranks, stride) == machines.ring(ranks, stride) != fast


def test_hops_are_the_mean_of_all_ranks():
    host = Host("h", ACCELERATORS["H100"], 8, Link(0.0, 8e9), Link(0.0, 1e9))
    assert Machines(host, 1).hop_s(8e9, 1) == pytest.approx(1.0)
    assert Machines(host, 2).hop_s(8e9, 8) == pytest.approx(8.0)
    assert Machines(host, 2).hop_s(8e9, 2) == pytest.approx(0.25 * 8 + 0.75)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weft": "graph"}, r'\$\.weft: expected "machine"'),
        ({"inside": 3}, r"\$\.inside: expected a string"),
        ({"colour": "red"}, r'\$: "colour" is unknown here'),
        ({"accelerators": -1}, r"\$\.accelerators: expected a whole number from 0"),
        ({"accelerators": 0}, "has 0 accelerators, it must have at least 1"),
        ({"price_per_hour": -2}, "costs -2.0 an hour, it must be a number from 0 to 1,000,000,000,000"),
        ({"accelerator": "K80"}, 'there is no accelerator "K80"'),
        ({"conduct": {"tensor": 2.0}}, "conduct: tensor is 2.0, it must be from 0 to 1"),
        ({"accelerator": {**PLAIN, "peak": {"int4": 1}}}, '"int4" is unknown'),
        ({"accelerator": {**PLAIN, "memory": "0B", "peak": {}}}, "memory_bytes is 0.*no peak"),
        ({"accelerator": {**PLAIN, "share": {"bf16": 3}}}, "the share of bf16 is 3.0, it must be above 0 and"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(change, told):
    given = {**json.loads(host_to_json(host_of("L4"))), **change}
    with pytest.raises((ConfigError, FormatError), match=told):
        host_from_json(json.dumps(given))


def test_known_accelerators_may_be_named_in_a_file():
    given = json.loads(host_to_json(host_of("A100-80", 4)))
    found = host_from_json(json.dumps({**given, "accelerator": "A100-80"}))
    assert found.accelerator == ACCELERATORS["A100-80"]


def test_rates_that_a_device_lacks_are_refused():
    with pytest.raises(ConfigError, match='"T4" has no rate for "bf16": choose one of fp32, fp16'):
        ACCELERATORS["T4"].rate("bf16")
    with pytest.raises(ConfigError, match="half_flops is -1"):
        Accelerator("x", 1, 1.0, {"fp32": 1.0}, half_flops=-1)
