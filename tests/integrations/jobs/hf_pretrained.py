"""A pretrained model, converted while it is read: its losses, and the memory that it took before the first step.

weft run -n 2 hf_pretrained.py FOLDER delayed      the script says so
weft run -n 2 hf_pretrained.py FOLDER large        nothing says so, but the model is large for a rank
python hf_pretrained.py FOLDER plain               beside it

The folder is that of a model of transformers; of diffusers, if its name begins with "unet".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import weft.torch as weft


def resident_mib() -> float:
    found = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    ]
    return int(found[0].split()[1]) / 1024


def language() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM, lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def denoiser() -> tuple[Any, Any]:
    from diffusers import UNet2DConditionModel

    def loss_of(model: Any, ids: Any) -> Any:
        given = torch.sin(ids.double())[:, None, :, None].expand(-1, 4, -1, 16)
        text = torch.cos(ids.double())[..., None].expand(-1, -1, 64)
        return (model(given, ids[:, 0], text).sample - given).square().mean()

    return UNet2DConditionModel, loss_of


def main(folder: str, way: str) -> None:
    torch.set_num_threads(1)
    limit = {"memory_limit": 0.03} if way == "large" else {}
    weft.init(partitions=1 if way == "plain" else 2, microbatches=2, **limit)
    kind, loss_of = Path(folder).name.startswith("unet") and denoiser() or language()
    kind.from_pretrained(folder)  # imports what it needs, and reads nothing
    before = resident_mib()
    with weft.delay_param_initialization(way == "delayed"):
        net = kind.from_pretrained(
            folder, **{"torch_dtype" if kind.__name__[0] == "U" else "dtype": torch.float64}
        )
    grown = resident_mib() - before
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @weft.step
    def step(model: Any, ids: Any) -> Any:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        ids = torch.randint(0, 4096, (4, 16), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        losses.append(float(step(model, ids).reduce_mean()))
        optimizer.step()
    print("RESULT", json.dumps({"losses": losses, "grown": grown}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
