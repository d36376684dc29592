import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError, FormatError, UsageError
from weft.topology.cluster import Cluster, Link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("25GB/s,2us", Link(2e-6, 25e9)),
        ("2us, 25GB/s", Link(2e-6, 25e9)),
        ("25GB/s", Link(0.0, 25e9)),
        ("1ms", Link(1e-3, math.inf)),
        ("100MiB/s,0.5ms,shared", Link(5e-4, 100 * 2**20, shared=True)),
        (" shared , 1ms ", Link(1e-3, shared=True)),
    ],
)
def test_parse(text, link):
    assert Link.parse(text) == link


def test_a_parsed_link_has_a_name():
    assert Link.parse("5us", name="bus").name == "bus"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", '"" is not a link, write for example "25GB/s,5us": "" is not a duration'),
        ("fast", '"fast" is not a link, .*: "fast" is not a duration'),
        ("25GB/s,", 'is not a link, .*: "" is not a duration'),
        ("25Gbit/s", 'is not a link, .*: .* its unit is "Gbit/s", known are B/s, KB/s'),
        ("5us,6us", '"5us,6us" is not a link: it has a latency twice'),
        ("1GB/s,1GB/s", "it has a bandwidth twice"),
        ("1GB/s,shared,shared", "it has the word shared twice"),
        ("shared", '"shared" is not a link: it has neither bandwidth nor latency, write "25GB/s,5us"'),
    ],
)
def test_what_is_no_link(text, fault):
    with pytest.raises(FormatError, match=fault):
        Link.parse(text)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ((-1.0,), 'link "link": its latency is -1.0 s, it must be a number that is not negative'),
        ((math.inf,), "its latency is inf s"),
        ((0.0, 0.0), 'link "link": its bandwidth is 0.0 bytes/s, it must be more than 0'),
        ((math.nan, math.nan), "its latency is nan s.*; its bandwidth is nan bytes/s"),
    ],
)
def test_numbers_that_cannot_be(values, fault):
    with pytest.raises(ConfigError, match=fault):
        Link(*values)


def test_a_link_without_bandwidth_costs_latency_only():
    assert Link(0.5).transfer_s(10**12) == 0.5
    assert Link(0.5, 4.0).transfer_s(8) == 2.5
    assert Link(0.5, 4.0).occupied_s(8) == 2.0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_links_of_a_cluster(ranks_per_host, data):
    intra, inter = Link(1.0), Link(2.0, 8.0, shared=True)
    cluster = Cluster(tuple(ranks_per_host), intra, inter)
    hosts = [host for host, ranks in enumerate(ranks_per_host) for _ in range(ranks)]
    sender, receiver = (data.draw(st.integers(0, cluster.size - 1)) for _ in range(2))
    link = cluster.link(sender, receiver)
    assert cluster.host_of(sender) == hosts[sender]
    if hosts[sender] == hosts[receiver]:
        assert link == Link(1.0, name=f"host {hosts[sender]} intra-host")
    else:
        assert link == Link(2.0, 8.0, shared=True, name=f"host {hosts[sender]} inter-host")


def test_faults_of_a_cluster():
    with pytest.raises(ConfigError, match="host 1 has 0 ranks, it must have at least 1; host 2 has -1"):
        Cluster((2, 0, -1))
    with pytest.raises(ConfigError, match="the cluster has no host, give the number of ranks of each"):
        Cluster(())
    with pytest.raises(UsageError, match="there is no rank 4, the cluster has 4"):
        Cluster((2, 2)).link(0, 4)
