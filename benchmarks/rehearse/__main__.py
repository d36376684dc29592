"""Memory as `weft rehearse` tells it before a run, beside what ranks then had: ten models on two to four ranks.

    python -m benchmarks.rehearse [NAME ...]

A rank's memory is the most that it had resident in a step after the second one, less what it had before the model
was made, and less what that is for a tiny model (threads, code that a step loads). Large freed buffers go back to the
system at once, so that it is what is in use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from benchmarks import machine

MIB = 2**20
STEPS = 5
BATCH = 8
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 17),
}


class Perceptron(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
                for _ in range(6)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def perceptron(width: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    return Perceptron(width), {"x": torch.randn(1024, width)}


def tiny() -> tuple[nn.Module, dict[str, Tensor]]:
    return perceptron(8)


def _words(count: int, length: int = 512, **more: Any) -> dict[str, Tensor]:
    ids = torch.randint(0, count, (BATCH, length))
    return {"input_ids": ids, "labels": ids, **more}


def _text(kind: str, sizes: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = getattr(
        transformers, f"{kind.partition('For')[0]}Config" if "LMHead" not in kind else "GPT2Config"
    )
    made = config(vocab_size=4096, **sizes)
    return getattr(transformers, kind)(made), _words(4096)


ROPE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    return _text("GPT2LMHeadModel", {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 512})


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    return _text("LlamaForCausalLM", {**ROPE, "intermediate_size": 1536})


def qwen3() -> tuple[nn.Module, dict[str, Tensor]]:
    return _text(
        "Qwen3ForCausalLM", {**ROPE, "intermediate_size": 1536, "head_dim": 64, "tie_word_embeddings": True}
    )


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    return _text("MixtralForCausalLM", {**ROPE, "intermediate_size": 512, "num_local_experts": 4})


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    return _text("BertForMaskedLM", sizes)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
    return _text("T5ForConditionalGeneration", {**sizes, "decoder_start_token_id": 0, "pad_token_id": 0})


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    net = ViTForImageClassification(ViTConfig(image_size=224, patch_size=16, num_labels=10, **sizes))
    return net, {"pixel_values": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 2, (16,))}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    net = ResNetForImageClassification(ResNetConfig(num_labels=10))
    return net, {"pixel_values": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 2, (16,))}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "max_source_positions": 400,
             "encoder_attention_heads": 6, "decoder_attention_heads": 6, "vocab_size": 4096, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [],
             "begin_suppress_tokens": []}  # fmt: skip
    net = WhisperForConditionalGeneration(WhisperConfig(**sizes))
    return net, {
        "input_features": torch.randn(BATCH, 80, 800),
        "labels": torch.randint(3, 4096, (BATCH, 128)),
    }


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], int]] = {
    made.__name__: (made, ranks)
    for made, ranks in (
        (tiny, 2), (perceptron, 2), (gpt2, 2), (llama, 2), (qwen3, 3), (mixtral, 2), (bert, 4), (t5, 2),
        (vit, 2), (resnet, 2), (whisper, 2),
    )
}  # fmt: skip


def rank(name: str) -> None:
    """One rank of the job: it writes the most memory that it had, in bytes."""
    made, ranks = MODELS[name]
    weft.init(
        partitions=ranks, microbatches=4, pipeline="1f1b", optimize="memory", verify="off",
        deterministic=True, memory_weight=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.ones(256, 256) @ torch.ones(256, 256)
    with torch.device("meta"):
        made()  # it imports what it needs
    before = machine.rss_bytes()
    net, batch = made()
    net.train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))

    @weft.step
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(**batch)
        loss = found if isinstance(found, Tensor) else found.loss
        model.backward(loss)
        return loss

    for number in range(STEPS):
        if number == 2:
            machine.reset_peak_rss()
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()
    if "FOUND" in os.environ:
        Path(os.environ["FOUND"], str(weft.rank())).write_text(str(machine.peak_rss_bytes() - before))


def compare(name: str) -> tuple[list[float], list[float]]:
    """The bytes of each rank: by rehearsal, and resident."""
    ranks = MODELS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"from benchmarks.rehearse.__main__ import rank\nrank({name!r})\n")
        found = Path(folder, "found")
        found.mkdir()
        weft_ = [sys.executable, "-m", "weft"]
        environ = os.environ | ENVIRONMENT | {"PYTHONPATH": os.getcwd()}
        answer = Path(folder, "answer.json")
        asked = ["rehearse", "-n", str(ranks), "--device", "A100-80", "--json", str(answer), str(script)]
        subprocess.run([*weft_, *asked], check=True, env=environ, stdout=subprocess.DEVNULL)
        real = environ | {"FOUND": str(found)}
        subprocess.run(
            [*weft_, "run", "-n", str(ranks), "--quiet", str(script)],
            check=True,
            env=real,
            stdout=subprocess.DEVNULL,
        )
        told = [part["total"] - part["reserved"] for part in json.loads(answer.read_text())["parts"]]
        return told, [float(Path(found, str(number)).read_text()) for number in range(ranks)]


def main(names: list[str]) -> None:
    print(machine.machine_name(), end="\n\n")
    print("| model | rank | rehearsed MiB | measured MiB | ratio |")
    print("| --- | --- | ---: | ---: | ---: |")
    empty = max(compare("tiny")[1])
    for name in names or list(MODELS)[1:]:
        for number, (told, had) in enumerate(zip(*compare(name), strict=True)):
            print(
                f"| {name} | {number} | {told / MIB:.0f} | {(had - empty) / MIB:.0f} | {told / (had - empty):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
