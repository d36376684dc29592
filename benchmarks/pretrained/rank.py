"""One rank: reads the model, runs a step of evaluation, and prints the memory that it took."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import weft.torch as weft


def anonymous_mib() -> float:
    """Memory that belongs to no file: the system cannot take it back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Peak(threading.Thread):
    """Looks at the memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.mib = max(self.mib, anonymous_mib())
            time.sleep(0.005)


def main(folder: str, delayed: bool) -> None:
    torch.set_num_threads(1)
    weft.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=2, verify="off")
    AutoModelForCausalLM.from_pretrained(folder)  # imports what it needs; nothing is read
    before, peak = anonymous_mib(), Peak()
    peak.start()
    with weft.delay_param_initialization(delayed):
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = weft.DistributedModel(net)

    @weft.step
    def step(model: Any, ids: Any) -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    with torch.no_grad():
        step(model, torch.randint(0, 16384, (2, 16), generator=torch.Generator().manual_seed(0)))
    own = sum(each.nbytes for each in model.local_parameters()) / 2**20
    found = {"own": own, "peak": peak.mib - before, "after": anonymous_mib() - before}
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], len(sys.argv) > 2)
