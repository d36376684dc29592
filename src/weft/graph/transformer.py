"""The graph of a decoder-only transformer described by its sizes, for models that nobody can run here.

    parameters    a layer 4 h^2 + 2 h f + 9 h + f, the embedding V h + s h                            [1]
    FLOPs         forward: a layer b s (8 h^2 + 4 h f) + 4 b s^2 h, the head 2 b s h V;
                  backward: twice as many                                                             [1]
    activations   a layer s b (18 h + 4 f) + 5 a s^2 b bytes, the head 4 s b h (1 + V / h),
                  the embedding s b h                                                                 [2]

With f = 4 h these are the published 12 h^2 + 13 h, 24 b s h^2 + 4 b s^2 h and s b h (34 + 5 a s / h).
Letters, sources, and the formulas for gates and for fewer heads of keys are those of `weft.graph.sizes`.
"""

from __future__ import annotations

import math

from weft.errors import ConfigError
from weft.graph.model import Graph, Unit
from weft.graph.sizes import RECOMPUTE, Sizes


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
    kv_heads: int | None = None,
    gated: bool = False,
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
        kv_heads: Heads of keys and values, where they are fewer than those of queries (grouped-query attention).
        gated: Whether the feed-forward layer has a gate (SwiGLU), as in Llama.

    Parameters take 4 bytes each. With the gradient and two moments that `weft.partition` adds these are 16,
    as many as mixed precision with Adam takes.

    >>> graph = transformer(layers=96, hidden=12288, heads=96, ffn=4 * 12288, vocab=51200, seq=2048)
    >>> round(sum(unit.parameters for unit in graph) / 1e9, 1)
    174.6
    >>> llama = transformer(80, 8192, 64, 28672, 128256, 8192, kv_heads=8, gated=True, tied=False)
    >>> round(sum(unit.parameters for unit in llama) / 1e9, 1)
    70.6
    """
    sizes = Sizes(layers, hidden, heads, ffn, vocab, seq, kv_heads=kv_heads, gated=gated, tied=tied)
    _check(batch, flops_per_s, recompute)
    tokens = batch * seq
    scores = sizes.score_flops(tokens)
    forward = sizes.matrix_flops(tokens) + scores
    again = {"none": 0, "selective": scores, "full": forward}[recompute]
    kept = int(sizes.kept_bytes(tokens, recompute))
    stream, logits = 2 * tokens * hidden, sizes.head_flops(tokens)
    group, own = ("embedding", 0) if tied else (None, sizes.table_parameters)
    ends = int(sizes.embedding_bytes(tokens)), int(sizes.head_bytes(tokens))
    ms, weights = 1e3 / flops_per_s, sizes.layer_parameters
    rows = [
        ("embedding", 0, 0, sizes.embedding_parameters, ends[0], stream, group),
        *((f"blocks.{i}", forward, 2 * forward + again, weights, kept, stream, None) for i in range(layers)),
        ("head", logits, 2 * logits, own, ends[1], 4, group),
    ]
    return Graph(
        Unit(name, ahead * ms, back * ms, 4 * numbers, held, result, numbers, tie)
        for name, ahead, back, numbers, held, result, tie in rows
    )


def _check(batch: int, flops_per_s: float, recompute: str) -> None:
    faults = [] if batch >= 1 else [f"batch is {batch}, it must be at least 1"]
    if not 0.0 < flops_per_s < math.inf:
        faults.append(f"flops_per_s is {flops_per_s}, it must be a number above 0")
    if recompute not in RECOMPUTE:
        faults.append(f'recompute is "{recompute}", it must be one of {", ".join(RECOMPUTE)}')
    if faults:
        raise ConfigError("; ".join(faults))
