"""Classes of the zoo used in another way: activation checkpointing, every output asked for, two losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH_SIZE, CASES, Batch, add, generator, network
from .encoders import bert_sizes
from .inputs import masked


def checkpointed(name: str, reentrant: bool) -> Callable[[], nn.Module]:
    """A builder for the network of a case that recomputes its layers in the backward pass."""

    def build() -> nn.Module:
        net = CASES[name].build()
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return net

    return build


for reentrant in (False, True):
    for name in ("GPT2LMHeadModel", "T5ForConditionalGeneration"):
        kind = "reentrant" if reentrant else "checkpointed"
        add(f"{name}:{kind}", checkpointed(name, reentrant), CASES[name].batch)


def _everything(outputs: Any) -> Tensor:
    extra = [*outputs.hidden_states, *outputs.attentions]
    return outputs.loss + 0.01 * sum(value.float().square().mean() for value in extra)


def _eager(name: str) -> Callable[[], nn.Module]:
    """A builder whose attention gives its weights."""

    def build() -> nn.Module:
        net = CASES[name].build()
        net.set_attn_implementation("eager")
        return net

    return build


for name in ("LlamaForCausalLM", "BertForMaskedLM"):
    options = {"output_hidden_states": True, "output_attentions": True}
    add(f"{name}:outputs", _eager(name), CASES[name].batch, loss=_everything, options=options)


def _sentences(step: int) -> Batch:
    """Masked tokens and whether the second sentence follows the first [B]."""
    follows = torch.randint(0, 2, (BATCH_SIZE,), generator=generator(step + 50))
    return {**masked(types=True)(step), "next_sentence_label": follows}


add("BertForPreTraining", network("BertForPreTraining", "BertConfig", **bert_sizes), _sentences)
