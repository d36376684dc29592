"""One rank of the sums; rank 0 prints the table. Contenders take turns, sum by sum."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import weft.torch as weft
from weft.reduce.choice import choose
from weft.reduce.collective import Collective

SIZES_MIB = (1 / 16, 1 / 4, 1, 4, 16, 25, 64, 256)
WARM = 2


def slowest_s(collective: Collective, flat: torch.Tensor) -> float:
    """One sum, the processes starting together: the time of the slowest."""
    flat.fill_(1.0)
    dist.barrier()
    begin = time.perf_counter()
    collective.all_reduce(flat).wait()
    took = torch.tensor([time.perf_counter() - begin])
    assert flat[0] == flat[-1] == collective.size
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main(most_mib: float, budget_mib: float) -> None:
    torch.set_num_threads(1)
    weft.init({"partitions": 1})
    several = {"gloo": choose(dist.group.WORLD, "direct"), "shared": choose(dist.group.WORLD, "shared")}
    if weft.rank() == 0:
        print("| MiB | gloo (ms) | shared (ms) | ratio | best gloo | best shared | ratio | sums |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in (size for size in SIZES_MIB if size <= most_mib):
        flat = torch.empty(int(size * 2**20) // 4)
        count = int(min(200, max(4, budget_mib / size)))
        times: dict[str, list[float]] = {name: [] for name in several}
        for _ in range(count + WARM):
            for name, each in several.items():
                times[name].append(slowest_s(each, flat) * 1e3)
        kept = {name: found[WARM:] for name, found in times.items()}
        gloo, shared = (statistics.median(kept[name]) for name in several)
        best = [min(kept[name]) for name in several]
        if weft.rank() == 0:
            middle = f"{gloo:.3f} | {shared:.3f} | {shared / gloo:.2f}"
            ends = f"{best[0]:.3f} | {best[1]:.3f} | {best[1] / best[0]:.2f}"
            print(f"| {size:g} | {middle} | {ends} | {count} |", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
