"""The original's names for parts of Hugging Face's models, which it replaces by its own transformer.

model.transformer.seq_layers                   the layers
layer.attention, .cross_attention, .output     the two halves of a layer
"""

from __future__ import annotations

import operator
from types import ModuleType

_LAYERS = {"seq_layers": "h"}
_HALVES = {"attention": "attn", "output": "mlp"}
NAMES = {
    "transformers.models.gpt2.modeling_gpt2": {
        "GPT2Model": _LAYERS,
        "GPT2Block": {**_HALVES, "cross_attention": "crossattention"},
    },
    "transformers.models.gptj.modeling_gptj": {"GPTJModel": _LAYERS, "GPTJBlock": _HALVES},
    "transformers.models.gpt_neo.modeling_gpt_neo": {"GPTNeoModel": _LAYERS, "GPTNeoBlock": _HALVES},
}
"""For each module of ``transformers`` its classes, with the original's names and their own."""


def install(module: ModuleType) -> None:
    """Let the classes of one of these modules answer to the original's names."""
    for cls, names in NAMES[module.__name__].items():
        for name, own in names.items():
            setattr(getattr(module, cls), name, property(operator.attrgetter(own)))
