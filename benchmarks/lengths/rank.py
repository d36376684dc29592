"""One of two ranks of a pipeline that trains a GPT on the functions of Python's standard library; rank 0 prints."""

from __future__ import annotations

import ast
import random
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft.torch as weft
from benchmarks.gpt import GPT, GPTConfig

SHAPE = GPTConfig(blocks=4, width=128, heads=4, vocabulary=2048)
WARM = 3
IGNORED = -100


def functions() -> Iterator[list[str]]:
    """The words of each function in the standard library's sources; a comment or a text has several."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                yield re.findall(r"\w+|[^\w\s]", "\n".join(lines[node.lineno - 1 : node.end_lineno]))


def corpus(longest: int) -> list[list[int]]:
    """The numbers of the words of each function; 0 is padding, 1 a rare word."""
    found = list(functions())
    common = Counter(word for words in found for word in words).most_common(SHAPE.vocabulary - 2)
    numbers = {word: number for number, (word, _) in enumerate(common, 2)}
    return [[numbers.get(word, 1) for word in words[:longest]] for words in found]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The words of a batch and, for each, the next one, which is what it predicts."""
    longest = max(map(len, rows))
    words = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    targets = torch.cat([words[:, 1:], torch.zeros(len(rows), 1, dtype=torch.long)], 1)
    return words, targets.masked_fill(targets == 0, IGNORED)


def train(model: Any, words: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    model.backward(loss)
    return loss.detach()


def main(rows: int, longest: int, microbatches: int, batches: int) -> None:
    torch.set_num_threads(1)
    numbers = corpus(longest)
    lengths = sorted(map(len, numbers))
    weft.init({"partitions": 2, "microbatches": microbatches, "optimize": "speed"})
    torch.manual_seed(0)
    model = weft.DistributedModel(GPT(GPTConfig(**{**vars(SHAPE), "context": longest})))
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    by_tokens = weft.step(train, tokens=lambda model, words, targets: words != 0)
    by_rows = weft.step(train, weight=lambda model, words, targets: (targets != IGNORED).sum())
    draw, found = random.Random(0), []
    for _ in range(batches + WARM):
        words, targets = padded(draw.sample(numbers, rows))
        times = [float((words != 0).sum()) / words.numel()]
        losses = []
        for step in (by_tokens, by_rows, by_tokens):
            optimizer.zero_grad()
            dist.barrier()
            begun_s = time.perf_counter()
            losses.append(float(step(model, words, targets).reduce_mean()))
            dist.barrier()
            times.append(time.perf_counter() - begun_s)
        assert abs(losses[0] - losses[1]) < 1e-4 * losses[1], losses
        optimizer.step()
        found.append(times)
    if weft.rank() == 0:
        middle = [lengths[len(lengths) * part // 100] for part in (10, 50, 90)]
        print(f"{len(lengths)} functions; 10 %, 50 % and 90 % have at most {middle} words")
        filled, new, equal, again = (list(column) for column in zip(*found[WARM:], strict=True))
        ratios = [one / other for one, other in zip(new, equal, strict=True)]
        print(
            "| of the batch no padding | equal rows (s) | by tokens (s) | ratio | the same batch again, ratio |"
        )
        print("| --- | --- | --- | --- | --- |")
        print(
            f"| {statistics.mean(filled):.0%} | {sum(equal) / batches:.3f} | {sum(new) / batches:.3f} | "
            f"{sum(new) / sum(equal):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {sum(again) / sum(equal):.2f} |"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
