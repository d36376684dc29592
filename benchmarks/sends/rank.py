"""One of two ranks that exchange payloads; rank 0 prints the table. Contenders take turns, block by block."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import weft.torch as weft
from weft.transport.channel import VALUE, Key, Message
from weft.transport.rings import Rings
from weft.transport.torch_dist import TorchChannel

WIDTH = 256
PRODUCTS = 4
"""Matrix products that a rank computes while a payload is under way: a few milliseconds."""
WARM = 2


class Exchange:
    """Payloads of one size through one channel."""

    def __init__(self, channel: TorchChannel, numel: int) -> None:
        self.channel = channel
        self.payload = torch.ones(numel)
        self.weight = torch.eye(WIDTH)
        self.sent = 0

    def trip(self) -> None:
        """Send, compute, take what the other rank has sent, and read it."""
        peer, key = 1 - self.channel.rank, Key(VALUE, 0, 0, self.sent)
        self.sent += 1
        self.channel.send(peer, Message(key, self.payload))
        self.compute()
        self.take(peer, key)

    def compute(self) -> None:
        x = self.weight
        for _ in range(PRODUCTS):
            x = x @ self.weight

    def take(self, peer: int, key: Key) -> None:
        mailbox = self.channel.mailbox
        while True:
            seen = mailbox.arrivals
            if mailbox.failure is not None:
                raise mailbox.failure
            if (message := mailbox.take(peer, key)) is not None:
                assert message.payload[-1] == 1
                return
            mailbox.wait(seen, 10.0)

    def block(self, trips: int) -> tuple[float, float]:
        """Milliseconds of wall time of a trip (the median) and of processor time (the mean, both ranks)."""
        dist.barrier()
        walls, begin = [], time.process_time()
        for _ in range(trips):
            start = time.perf_counter()
            self.trip()
            walls.append(1e3 * (time.perf_counter() - start))
        self.channel.flush()
        used = torch.tensor([1e3 * (time.process_time() - begin) / trips])
        dist.all_reduce(used)
        return statistics.median(walls), float(used)


def main(sizes: list[float], rounds: int, trips: int) -> None:
    torch.set_num_threads(1)
    weft.init({"partitions": 1})
    channels = {}
    for name in ("gloo", "memory"):
        group = dist.new_group([0, 1], backend="gloo")
        rings = Rings.connect(group) if name == "memory" else None
        channels[name] = TorchChannel(group, torch.device("cpu"), rings=rings)
    if weft.rank() == 0:
        print(
            "| MiB | gloo (ms) | memory (ms) | ratio | gloo, processor (ms) | memory, processor (ms) | ratio |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        several = {name: Exchange(channel, int(size * 2**20) // 4) for name, channel in channels.items()}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in several}
        for _ in range(rounds + WARM):
            for name, each in several.items():
                found[name].append(each.block(trips))
        middle = [
            [statistics.median(column) for column in zip(*found[name][WARM:], strict=True)]
            for name in several
        ]
        if weft.rank() == 0:
            (wall, used), (other_wall, other_used) = middle
            print(
                f"| {size:g} | {wall:.2f} | {other_wall:.2f} | {other_wall / wall:.2f} "
                f"| {used:.2f} | {other_used:.2f} | {other_used / used:.2f} |",
                flush=True,
            )
    for channel in channels.values():
        channel.close()
    for channel in channels.values():
        channel.join()
    dist.barrier()


if __name__ == "__main__":
    main([float(size) for size in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3]))
