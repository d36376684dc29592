"""Worker: where ranks wait for their emulated GPU in a step, by the number of microbatches; see `test_emulated.py`.

waits.py FILE PARTITIONS CASE...

Writes the waits of each case and number of microbatches as JSON into FILE with the rank's number at its end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from benchmarks.gpt import GPT, GPTConfig
from tests.gpu.emulated_tensors import WAITS

ROWS, LENGTH, STEPS = 8, 128, 4
MICROBATCHES = 2, 8
CONFIG = GPTConfig(blocks=4, width=64, heads=2, context=LENGTH, vocabulary=256)


class Checkpointed(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


Between = Callable[[nn.Module, Any], None]
"""Work of a script between the step and the optimizer's."""


def clip(model: nn.Module, scaler: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"between": clip},
    "checkpointed": {"build": Checkpointed},
    "scaled": {"scales": True},
    "offloaded": {"offload": {"optimizer": True, "activations": True}},
    "chunked": {"chunked_loss": "on"},
    "sharded": {"sharded_data_parallel_degree": 2},
    "zero_bubble": {"pipeline": "zb_h1"},
    "tensor": {"tensor_parallel_degree": 2, "between": clip},
    "sequence": {"tensor_parallel_degree": 2, "sequence_parallel": True, "between": clip},
    "context": {"context_parallel_degree": 2, "between": clip},
}


def waits(
    partitions: int, microbatches: int, between: Between | None = None, build: Any = GPT, scales: bool = False,
    **settings: Any,
) -> dict[str, int]:  # fmt: skip
    """The waits of the last step, in which nothing is new any more, by where they are."""
    weft.init({"partitions": partitions, "microbatches": microbatches, "auto_partition": True, **settings})
    torch.manual_seed(3)
    model = weft.DistributedModel(build(CONFIG))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scaler = weft.amp.GradScaler(init_scale=8.0) if scales else None

    @weft.step
    def train_step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=scales):
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        model.backward(loss if scaler is None else scaler.scale(loss))
        return loss

    ids = torch.randint(CONFIG.vocabulary, (ROWS, LENGTH), device="cuda")
    for _ in range(STEPS):
        WAITS.found.clear()
        optimizer.zero_grad()
        loss = train_step(model, ids, ids)
        if between is not None:
            between(model, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    found = dict(WAITS.found)
    assert loss.reduce_mean().device.type == "cuda"
    assert all(p.device.type == "cuda" for p in model.local_parameters())
    weft.shutdown()
    return found


def main() -> None:
    file, partitions = sys.argv[1], int(sys.argv[2])
    found = {
        name: {str(count): waits(partitions, count, **CASES[name]) for count in MICROBATCHES}
        for name in sys.argv[3:]
    }
    Path(f"{file}{os.environ['RANK']}").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
