"""Fine-tuning a frozen model by adapters of low rank, on weights of fewer bits.

LoRA (Hu et al., arXiv 2106.09685) adds two matrices of r x inputs and results x r to every linear of a layer, and
trains only those: r (inputs + results) parameters for each linear. The rest is frozen: it has no gradients and no
optimizer states, and its backward pass computes gradients of inputs, not of weights: 4 of 6 FLOPs for a parameter.

QLoRA (Dettmers et al., arXiv 2305.14314) keeps the frozen linears in 4 bits (NF4), with a scale of 32 bits for each 64
of them: 4.5 bits. Its second quantisation of the scales is left out, as in the defaults of bitsandbytes: 4.13 bits.
LLM.int8 (arXiv 2208.07339) keeps 8 bits and a scale for each row. Embeddings, the head and adapters stay as they are.
"""

from __future__ import annotations

from weft.graph.sizes import Sizes

BITS = {8: 8.0, 4: 4.5}
"""Bits of a frozen parameter with its share of the scales, by what is asked for."""


def adapter_parameters(sizes: Sizes, rank: int) -> tuple[int, int]:
    """Parameters of the adapters of one layer: of all its linears, and those of its experts among them.

    >>> adapter_parameters(Sizes(layers=2, hidden=64, heads=4, ffn=256, vocab=100, seq=8), 2)
    (2304, 0)
    """
    hidden, networks = sizes.hidden, 3 if sizes.gated else 2
    attention = 4 * hidden + sizes.query_width + sizes.key_width + sizes.value_width + sizes.result_width
    widths = sizes.experts.shared if sizes.experts else sizes.ffn
    rest = networks * (hidden + widths) if widths else 0
    experts = networks * sizes.experts.count * (hidden + sizes.experts.width) if sizes.experts else 0
    return rank * (attention + rest + experts), rank * experts
