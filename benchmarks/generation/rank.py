"""One rank of `benchmarks.generation`: tokens per second of all prompts together, split and in one process, in turn."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
import transformers
from torch import Tensor

import weft.torch as weft


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "prompts", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    weft.init({"partitions": 2, "verify": "off"})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=given.width, intermediate_size=3 * given.width,
        num_hidden_layers=given.layers, num_attention_heads=8, num_key_value_heads=8,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).eval()
    plain = copy.deepcopy(net)
    model = weft.DistributedModel(net)

    def generate(model: Any, prompts: Tensor) -> Tensor:
        found: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=given.tokens,
            max_new_tokens=given.tokens,
        )
        return found

    split = weft.step(generate)
    every = given.prompts * given.tokens

    def rates(length: int) -> tuple[float, float, float]:
        """Tokens per second, split and in one process; and the processor time of a rank for each token in seconds."""
        prompts = torch.randint(
            2, 1000, (given.prompts, length), generator=torch.Generator().manual_seed(length)
        )
        weft.barrier()
        began, processor = time.perf_counter(), time.process_time()
        tokens = split(model, prompts).concat()
        took, busy = time.perf_counter() - began, time.process_time() - processor
        weft.barrier()
        if weft.rank():
            return 0.0, 1.0, busy
        began = time.perf_counter()
        assert torch.equal(generate(plain, prompts), tokens)
        return every / took, every / (time.perf_counter() - began), busy / every

    with torch.no_grad():
        rates(8)
        new = [rates(16 + 100 * number)[:2] for number in range(1, given.steps + 1)]
        rates(8)
        known = [rates(8) for _ in range(given.steps)]
    weft.barrier()
    if weft.rank() == 0:
        found = {
            "rate": statistics.median(mine for mine, _, _ in known),
            "ratio": statistics.median(mine / alone for mine, alone, _ in known),
            "new_ratio": statistics.median(mine / alone for mine, alone in new),
            "processor_ms": statistics.median(busy for *_, busy in known) * 1e3,
        }
        print("figures " + json.dumps(found))


if __name__ == "__main__":
    main()
