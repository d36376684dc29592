"""A decoder-only transformer described by its sizes, for models that nobody can run here.

Letters as in the papers: l layers, h hidden, a heads, f width of the feed-forward layer (4 h in the papers),
V vocabulary, s sequence, b microbatch.

    parameters    a layer 4 h^2 + 2 h f + 9 h + f, the embedding V h + s h                            [1]
    FLOPs         forward: a layer b s (8 h^2 + 4 h f) + 4 b s^2 h, the head 2 b s h V;
                  backward: twice as many                                                             [1]
    activations   a layer s b (18 h + 4 f) + 5 a s^2 b bytes, the head 4 s b h (1 + V / h),
                  the embedding s b h                                                                 [2]

With f = 4 h these are the published 12 h^2 + 13 h, 24 b s h^2 + 4 b s^2 h and s b h (34 + 5 a s / h).

[1] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    arXiv 2104.04473, equations 2 and 3.
[2] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
    section 4: 16-bit activations, dropout masks of one byte, logits in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.errors import ConfigError
from weft.graph.model import Graph, Unit

RECOMPUTE = ("none", "selective", "full")


def transformer(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    seq: int,
    *,
    batch: int = 1,
    flops_per_s: float = 140e12,
    recompute: str = "none",
    tied: bool = True,
) -> Graph:
    """The graph of a transformer: `embedding`, `blocks.0` and so on, `head`.

    Args:
        layers: How many blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        ffn: Width of the feed-forward layer.
        vocab: How many tokens there are.
        seq: Tokens of a sequence.
        batch: Sequences of a microbatch.
        flops_per_s: What a device reaches, not its peak. 140e12 is what [1] reports for an A100.
        recompute: Which activations are computed again in the backward pass: `none`, `selective` (the
            attention scores, 5 a s^2 b bytes less) or `full` (a block keeps its input alone).
        tied: Whether embedding and head share their matrix, as in [1].

    Parameters take 4 bytes each. With the gradient and two moments that `weft.partition` adds these are 16,
    as many as mixed precision with Adam takes.

    >>> graph = transformer(layers=96, hidden=12288, heads=96, ffn=4 * 12288, vocab=51200, seq=2048)
    >>> round(sum(unit.parameters for unit in graph) / 1e9, 1)
    174.6
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab, "seq": seq}
    _check({**sizes, "batch": batch}, flops_per_s, recompute)
    tokens = batch * seq
    scores = 4 * tokens * seq * hidden
    forward = tokens * (8 * hidden**2 + 4 * hidden * ffn) + scores
    again = {"none": 0, "selective": scores, "full": forward}[recompute]
    kept = {"none": 5 * heads * seq * tokens, "selective": 0, "full": 0}[recompute]
    kept += 2 * tokens * hidden if recompute == "full" else tokens * (18 * hidden + 4 * ffn)
    weights = 4 * hidden**2 + 2 * hidden * ffn + 9 * hidden + ffn
    table, stream = vocab * hidden, 2 * tokens * hidden
    logits = 2 * tokens * hidden * vocab
    group, own = ("embedding", 0) if tied else (None, table)
    ms = 1e3 / flops_per_s
    rows = [
        ("embedding", 0, 0, table + seq * hidden, tokens * hidden, stream, group),
        *((f"blocks.{i}", forward, 2 * forward + again, weights, kept, stream, None) for i in range(layers)),
        ("head", logits, 2 * logits, own, 4 * tokens * (hidden + vocab), 4, group),
    ]
    return Graph(
        Unit(name, ahead * ms, back * ms, 4 * numbers, held, result, numbers, tie)
        for name, ahead, back, numbers, held, result, tie in rows
    )


def _check(sizes: Mapping[str, int], flops_per_s: float, recompute: str) -> None:
    faults = [f"{name} is {size}, it must be at least 1" for name, size in sizes.items() if size < 1]
    if not 0.0 < flops_per_s < math.inf:
        faults.append(f"flops_per_s is {flops_per_s}, it must be a number above 0")
    if recompute not in RECOMPUTE:
        faults.append(f'recompute is "{recompute}", it must be one of {", ".join(RECOMPUTE)}')
    if faults:
        raise ConfigError("; ".join(faults))
