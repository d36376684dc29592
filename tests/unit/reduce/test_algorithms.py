"""What of the algorithms needs one process only."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError, TransportError, UsageError
from weft.reduce.bucket import bounds
from weft.reduce.choice import BySize, choose, hosts_of
from weft.reduce.collective import Collective, Direct
from weft.reduce.exchange import Exchange, GroupExchange, exchange
from weft.reduce.hierarchical import grid
from weft.reduce.shared import SharedMemory
from weft.reduce.worker import Worker
from weft.transport.segment import Segment


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shards_are_equal_and_cover_everything(numel: int, ranks: int):
    found = bounds(numel, ranks)
    assert found[0][0] == 0 and found[-1][1] == numel
    assert all(one[1] == two[0] for one, two in zip(found, found[1:], strict=False))
    lengths = [stop - start for start, stop in found]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "b"]])
def test_hosts_have_to_be_several_and_alike(hosts: list[str]):
    with pytest.raises(ConfigError, match="needs two hosts or more with equally many ranks, and these have"):
        grid(hosts)


def test_what_does_not_fit_is_told(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="there is no algorithm 'fast': choose one of auto, direct, shared"):
        choose(world, "fast")
    with pytest.raises(ConfigError, match="1 hosts are given for a group of 2 ranks"):
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        choose(world, "hierarchical", hosts=["a"])
    with pytest.raises(ConfigError, match="the ranks are on 2 hosts and the gradients are on meta: choose"):
        choose(world, "shared", hosts=["a", "b"], device=torch.device("meta"))


def test_one_rank_needs_no_algorithm(world: dist.ProcessGroup):
    assert isinstance(choose(world), Direct)
    assert len(hosts_of(world)) == 1


def test_what_shared_memory_cannot_add_up_is_told(world: dist.ProcessGroup):
    shared = SharedMemory.connect(world)
    for wrong in (
        torch.ones(2, 2),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, device="meta"),
    ):
        with pytest.raises(
            UsageError, match="shared memory adds up flat, contiguous CPU tensors of a number type"
        ):
            shared.all_reduce(wrong)
    shared.close()
    with pytest.raises(UsageError, match="this collective was closed: make a new one"):
        shared.all_reduce(torch.ones(2))


def test_shared_memory_adds_up_gradients_of_every_size(world: dist.ProcessGroup):
    """Small ones travel as one, up to 16384 values: neither side of that forgets one."""
    shared = SharedMemory.connect(world)
    gradients = [torch.full((size,), float(size)) for size in (1, 2, 128 * 128 - 1, 128 * 128, 128 * 128 + 1)]
    shared.sum_pieces(gradients, 0.5).wait()
    shared.close()
    for gradient in gradients:
        assert (gradient == gradient.numel() / 2).all(), gradient.numel()


def test_memory_of_nobody_cannot_be_mapped():
    own, address = Segment.create(4096)
    with pytest.raises(TransportError, match="it has another size"):
        Segment.open(address, 8192)
    with pytest.raises(TransportError, match="it is another process's"):
        Segment.open((*address[:2], address[2] ^ 1, address[3]), 4096)
    with pytest.raises(TransportError, match="cannot be mapped by process"):
        Segment.open((address[0], 10**6, 0, 0), 4096)
    own.close()


def test_every_algorithm_is_a_collective(world: dist.ProcessGroup):
    direct = Direct(world)
    assert isinstance(BySize(world, [(8, direct)]), Collective)
    assert isinstance(exchange(direct), Exchange)
    same = GroupExchange(world)
    assert exchange(same) is same
    with pytest.raises(UsageError, match="object has no process group, and this compression needs one"):
        exchange(object())  # type: ignore[arg-type]


def test_sums_go_to_the_collective_of_their_size(world: dist.ProcessGroup):
    small, large = Direct(world), Direct(world)
    table = BySize(world, [(64, small), (1024, large)])
    assert [table.find(size) for size in (1, 64, 65, 10_000)] == [small, small, large, large]


def test_steps_are_done_in_order_whoever_does_them():
    worker, order, gate = Worker("test"), [], threading.Event()
    jobs = [worker.submit(gate.wait, torch.ones(1))]
    jobs += [worker.submit(lambda i=i: order.append(i), torch.ones(1)) for i in range(50)]
    gate.set()
    jobs[-1].wait()
    assert order == list(range(50))
    worker.close()


def test_after_a_failure_nothing_more_is_done():
    worker, done = Worker("test"), []
    jobs = [worker.submit(lambda: 1 / 0, torch.ones(1)), worker.submit(lambda: done.append(1), torch.ones(1))]
    for job in jobs:
        with pytest.raises(ZeroDivisionError):
            job.wait()
    assert not done
    worker.close()
