"""Worker: sums and averages of flat tensors by every algorithm and compression, against brute force.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 4 tests/parity/reductions.py algorithms compressions
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft.torch as weft
from tests.parity.compare import device
from tests.parity.registry import Checks
from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.channels import Channels
from weft.reduce.choice import choose
from weft.reduce.collective import Collective, Direct, Work
from weft.reduce.compression import make
from weft.reduce.exchange import Exchange, GroupExchange
from weft.reduce.hierarchical import Hierarchical
from weft.reduce.shard_collectives import ShardCollectives
from weft.reduce.shared import HostMemory, SharedMemory

CHECKS = Checks()
# The spec, the largest difference of one update relative to the largest value, and whether errors are fed back.
BATTERY = {
    "fp16": (2e-3, False),
    "bf16": (2e-2, False),
    "int8": (2e-2, True),
    "int8:block=100": (2e-2, True),
    "int8:block=64,rounding=stochastic": (4e-2, True),
    "int8:feedback=false": (2e-2, False),
    "topk:ratio=0.3": (1.0, True),
    "powersgd:rank=2,start=2": (1e-5, True),
    "bf16+int8": (4e-2, False),
    "fp16+topk:ratio=0.5": (1.0, False),
}
HALF = ("bf16", "fp16", "int8")


def ranks() -> int:
    return dist.get_world_size()


@functools.lru_cache
def world() -> Any:
    """All ranks, with a backend for the tensors' device."""
    return dist.group.WORLD if device().type == "cpu" else dist.new_group(backend="nccl")


@functools.lru_cache(16)
def values(numel: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> list[torch.Tensor]:
    """What each rank has: the same on all ranks. Nobody writes into it."""
    made = [torch.Generator().manual_seed(1000 * salt + rank) for rank in range(ranks())]
    return [(torch.randn(numel, generator=each) * 8).to(device(), dtype) for each in made]


@functools.lru_cache(32)
def exact_sum(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """The sum of `values` in double precision, and the largest sum of their sizes."""
    rows = torch.stack(values(numel, dtype, salt=numel)).double()
    return rows.sum(0), float(rows.abs().sum(0).max())


def own(each: list[torch.Tensor]) -> torch.Tensor:
    return each[dist.get_rank()].clone()


def same_everywhere(flat: torch.Tensor) -> None:
    rows = GroupExchange(world()).all_gather(flat.contiguous().view(torch.uint8))
    assert all(torch.equal(row, rows[0]) for row in rows), "ranks have different bits"


def two_hosts() -> list[list[str]]:
    return [["a", "a", "b", "b"], ["a", "b", "b", "a"]] if ranks() == 4 else []


def collectives() -> dict[str, Collective]:
    everyone, where = world(), device()
    on_cpu = where.type == "cpu"
    found: dict[str, Collective] = {
        "direct": choose(everyone, "direct", device=where),
        "auto": choose(everyone, device=where),
    }
    if on_cpu:
        found["shared"] = choose(everyone, "shared")
        small = HostMemory.connect(everyone, slot_bytes=4096)
        found["shared, small slots"] = SharedMemory(everyone, small)
    for hosts in two_hosts():
        found[f"hierarchical {hosts}"] = choose(everyone, "hierarchical", hosts=hosts, device=where)
        found[f"auto {hosts}"] = choose(everyone, hosts=hosts, device=where)
    if two_hosts():
        compressed = choose(everyone, hosts=two_hosts()[0], compressed=True, device=where)
        assert isinstance(compressed, Channels if on_cpu else Hierarchical)
        assert isinstance(choose(everyone, hosts=["a", "b", "b", "b"], device=where), Direct)
    assert isinstance(choose(everyone, compressed=True, device=where), SharedMemory if on_cpu else Direct)
    return found


@CHECKS.check
def tensors_in_parts() -> None:
    """Sums, parts of sums, and parts all-gathered: in memory that ranks share, and by the group's own collectives."""
    everyone, size = world(), ranks()
    ways = [ShardCollectives(everyone), ShardCollectives.connect(everyone, device())]
    assert (ways[1].memory is not None) == (device().type == "cpu")
    if device().type == "cpu":  # several rounds
        ways.append(ShardCollectives(everyone, HostMemory.connect(everyone, slot_bytes=4096)))
    shapes = [
        ((3, 4, 5), 1),
        ((4,), 0),
        ((2, 64, 100), 1),
        ((2, 3, 1), 2),
        ((1, 2, 7), 1),
        ((0, 2, 3), 1),
        ((2, 0), 1),
    ]
    for shape, dim in shapes:
        whole_shape = [each * size if at == dim else each for at, each in enumerate(shape)]
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            every = torch.stack(values(math.prod(whole_shape), torch.float32)).view(size, *whole_shape)
            every = every.round().to(dtype)
            total = sum(every.unbind(0), torch.zeros_like(every[0]))
            mine = total.chunk(size, dim)[dist.get_rank()]
            for way in ways:
                given = every[dist.get_rank()].clone()
                found = way.reduce_scatter(given, dim)
                assert torch.equal(found, mine) and not found._is_view(), (shape, dtype)
                assert torch.equal(given, every[dist.get_rank()]), "what was given has changed"
                turned = given.transpose(0, -1).contiguous().transpose(0, -1)
                assert torch.equal(way.reduce_scatter(turned, dim), mine), (shape, dtype)
                whole = way.all_gather(mine, dim)
                assert torch.equal(whole, total) and whole.is_contiguous(), (shape, dtype)
                way.all_reduce(given)
                assert torch.equal(given, total), (shape, dtype)
    for way in ways:
        way.close()


@CHECKS.check
def algorithms() -> None:
    """Sums equal brute force; several are in flight; all ranks get the same bits."""
    for name, each in collectives().items():
        assert each.size == ranks()
        for dtype, close in {
            torch.float32: 1e-6,
            torch.float64: 1e-12,
            torch.bfloat16: 2e-2,
            torch.int64: 0,
        }.items():
            sizes = [1, 3, 1000, 70_001, 600_001]
            if "small" in name:
                sizes.pop()  # slots of 4 KiB take turns more than a hundred times for the one before, too
            flats = [own(values(numel, dtype, salt=numel)) for numel in sizes]
            works = [each.all_reduce(flat) for flat in flats]
            for flat, work in zip(flats, works, strict=True):
                work.wait()
                exact, scale = exact_sum(flat.numel(), dtype)
                assert float((flat.double() - exact).abs().max()) <= close * scale, (
                    name,
                    dtype,
                    flat.numel(),
                )
                same_everywhere(flat)
        works = [each.all_reduce(torch.ones(5000, device=device())) for _ in range(20)]
        for work in works:
            work.wait()
        each.close()


@CHECKS.check
def pieces() -> None:
    """Tensors summed where they are equal brute force, however they are cut; in fp16 nothing overflows."""
    everyone = dist.group.WORLD
    small = HostMemory.connect(everyone, slot_bytes=4096)
    slots = (SharedMemory.connect(everyone), SharedMemory(everyone, small))
    for each in slots:
        for dtype, close in {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 4e-3}.items():
            for sizes in ([1], [0, 5, 0, 1], [700, 1, 2_000, 0, 33], [300_001, 17, 250_000, 5, 0, 40_000]):
                whole = [each.cpu() for each in values(sum(sizes), dtype, salt=sum(sizes))]
                flat = own(whole)
                works = [
                    each.sum_pieces(list(flat.split(sizes)), 1 / ranks()),
                    each.sum_pieces([torch.full((3,), 60_000.0, dtype=torch.float16)], 1 / ranks()),
                ]
                for work in works:
                    work.wait()
                exact = torch.stack([row.double() for row in whole]).mean(0)
                assert float((flat.double() - exact).abs().max()) <= close * float(exact.abs().max().clamp(1))
                same_everywhere(flat)
        large = torch.full((5,), 60_000.0, dtype=torch.float16)
        each.sum_pieces([large[:2], large[2:]], 1 / ranks()).wait()
        assert torch.allclose(large.float(), torch.tensor(60_000.0), rtol=1e-3)
        each.close()


@CHECKS.check
def halves_of_a_sum() -> None:
    """Inside one host: a scaled reduce-scatter gives each rank its shard of the mean, an all-gather gives the rest."""
    everyone = dist.group.WORLD
    for slot_bytes in (4096, None):
        memory = HostMemory.connect(everyone, slot_bytes=slot_bytes)
        for dtype, close in {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 4e-3}.items():
            for numel in (1, 1001, 70_003):
                whole = [each.cpu() for each in values(numel, dtype, salt=numel)]
                flat = own(whole)
                memory.reduce_scatter(flat, 1 / ranks())
                exact = torch.stack([row.double() for row in whole]).mean(0)
                largest = close * float(exact.abs().max().clamp(1))
                own_part = memory.shard(flat).double() - memory.shard(exact)
                assert not own_part.numel() or float(own_part.abs().max()) <= largest
                memory.all_gather(flat)
                assert float((flat.double() - exact).abs().max()) <= largest
                same_everywhere(flat)
        full = torch.full((ranks(),), 60_000.0, dtype=torch.float16)
        memory.reduce_scatter(full, 1 / ranks())
        assert torch.allclose(memory.shard(full).float(), torch.tensor(60_000.0), rtol=1e-3), "it overflowed"
        counts = torch.arange(ranks())
        memory.reduce_scatter(counts)
        assert memory.shard(counts).item() == memory.rank * ranks(), "whole numbers are summed as they are"
        memory.close()


class Counted:
    """An exchange that counts the bytes that a rank sends, for collectives that send no more than they must."""

    def __init__(self, below: Exchange) -> None:
        self.below, self.size, self.rank, self.group = below, below.size, below.rank, below.group
        self.sent = 0.0

    def all_reduce(self, flat: torch.Tensor) -> Work:
        self.sent += 2 * flat.nbytes * (self.size - 1) / self.size
        return self.below.all_reduce(flat)

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        self.sent += flat.nbytes * (self.size - 1)
        return self.below.all_gather(flat)

    def all_to_all(self, flat: torch.Tensor) -> torch.Tensor:
        self.sent += flat.nbytes * (self.size - 1) / self.size
        return self.below.all_to_all(flat)

    def close(self) -> None:
        pass


@CHECKS.check
def volumes() -> None:
    """Bytes sent are those of the docstrings."""
    n, numel = ranks(), ranks() * 256 * 40
    ring = 8 * numel * (n - 1) / n
    expected = {
        "fp16": ring / 2,
        "int8": ring / 4 * (1 + 4 / 256),
        "int8:block=128": ring / 4 * (1 + 4 / 128),
        "topk:ratio=0.01": 8 * -(-numel // 100) * (n - 1),
    }
    for spec, sent in expected.items():
        counted, compression = Counted(GroupExchange(world())), make(spec)
        state = compression.init(numel, torch.float32, device(), n)
        compression.update(state, own(values(numel)), counted)
        assert counted.sent == sent, (spec, counted.sent, sent)


@CHECKS.check
def compressions() -> None:
    """One battery for every compression, over the backend and, for four ranks, between two hosts."""
    over: dict[str, Collective] = {"direct": Direct(world())}
    if device().type == "cpu":
        over["shared"] = choose(world(), "shared")
    if two_hosts():
        over["hierarchical"] = choose(world(), "hierarchical", hosts=two_hosts()[0], device=device())
    for where, collective in over.items():
        for spec in BATTERY:
            for numel in (1, 257, 5000):
                try:
                    battery(spec, collective, numel)
                except AssertionError as error:
                    raise AssertionError(f"{spec} over {where}, {numel} values: {error}") from error
        for spec in HALF:
            half = own(values(300, torch.float16))
            exact = torch.stack(values(300, torch.float16)).float().mean(0)
            found = updates(spec, collective, 300, torch.float16)(half)
            assert found is half and found.dtype == torch.float16
            assert float((found.float() - exact).abs().max()) < 0.3, (spec, where)
        collective.close()


def updates(
    spec: str, collective: Collective, numel: int, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Tensor], torch.Tensor]:
    compression = make(spec)
    state = compression.init(numel, dtype, device(), ranks())
    return lambda flat: compression.update(state, flat, collective)


def battery(spec: str, collective: Collective, numel: int) -> None:
    close, fed_back = BATTERY[spec]
    update = updates(spec, collective, numel)
    rows = values(numel, salt=numel)
    exact = torch.stack(rows).double().mean(0)
    largest = float(torch.stack(rows).abs().max())

    found = update(own(rows))
    same_everywhere(found)
    assert float((found.double() - exact).abs().max()) <= close * largest, "the average is off"

    if fed_back and numel == 257:
        steps = 120 if spec.startswith("powersgd") else 40
        total = found.double()
        for _ in range(steps - 1):
            total += update(own(rows))
        assert float((total / steps - exact).abs().max()) <= 0.15 * largest, (
            "what is not sent at once never comes"
        )

    broken = own(rows)
    if dist.get_rank() == ranks() - 1:
        broken[numel // 2] = float("inf")
    assert not torch.isfinite(update(broken)).all(), "a value that is not finite was lost"
    if spec.startswith("powersgd"):
        update(own(rows))
    assert torch.isfinite(update(own(rows))).all(), "a value that is not finite was kept"

    update = updates(spec, collective, numel)
    for _ in range(3):
        assert not update(torch.zeros(numel, device=device())).any(), "zeros have another average"


@CHECKS.check
def chance() -> None:
    """Stochastic rounding is right on average, where nearest rounding is not."""
    flat = torch.full((512,), 0.3, device=device())
    flat[::256] = 127.0
    means = {}
    for rounding in ("nearest", "stochastic"):
        update = updates(f"int8:rounding={rounding},feedback=false", Direct(world()), 512)
        means[rounding] = float(torch.stack([update(flat.clone())[1:256] for _ in range(60)]).mean())
    assert means["nearest"] == 0.0 and abs(means["stochastic"] - 0.3) < 0.05, means


@CHECKS.check
def lanes() -> None:
    """Buckets in flight through a lane, whole or in pieces that take several tracks, step after step."""
    collective: Collective = Direct(world())
    if two_hosts():
        collective = choose(world(), "hierarchical", hosts=two_hosts()[0], device=device())
    for spec in ("int8", "fp16", "topk:ratio=0.5", None):
        queue = AllReduceQueue(collective, make(spec) if spec else None)
        sizes = [2_400_001, 5, 600_001]
        given = [values(numel, salt=numel) for numel in sizes]
        for _ in range(2):
            flats = [own(rows).mul_(queue.scale) for rows in given]
            works = [queue.launch(number, flat) for number, flat in enumerate(flats)]
            for work in works:  # all, because what follows uses the same group
                work.wait()
            for flat, rows in zip(flats, given, strict=True):
                same_everywhere(flat)
                exact = torch.stack(rows).mean(0)
                close = 1.0 if spec and spec.startswith("topk") else 2e-2
                assert float((flat - exact).abs().max()) <= close * float(torch.stack(rows).abs().max()), spec
    collective.close()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: weft.init({"partitions": 1}))
    dist.barrier()
