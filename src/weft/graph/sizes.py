"""The sizes of a decoder-only transformer, and what follows from them alone: parameters, FLOPs, activations.

Letters as in the papers: l layers, h hidden, a attention heads, k heads of keys and values, d width of a head (h / a if
not given), f width of the feed-forward layer, V vocabulary, s sequence, b microbatch, t tensor-parallel ranks.

[1] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    arXiv 2104.04473, equations 2 and 3.
[2] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.
[3] Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202: three matrices instead of two.
[4] Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", arXiv 2305.13245: fewer heads of keys
    and values than of queries.

Experts, their letters and sources [5] to [8]: `weft.graph.experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.graph.experts import Experts, Latent

RECOMPUTE = ("none", "selective", "full")
"""What the backward pass computes again: nothing, the attention scores, whole layers."""


@dataclass(frozen=True)
class Sizes:
    """A transformer by its sizes.

    Attributes:
        layers: How many blocks.
        hidden: Width of the residual stream.
        heads: Attention heads of queries.
        ffn: Width of the feed-forward layer.
        vocab: How many tokens there are.
        seq: Tokens of a sequence.
        kv_heads: Heads of keys and values; as many as `heads` if not given.
        head_width: Width of a head; `hidden / heads` if not given.
        gated: Whether the feed-forward layer has a gate (SwiGLU) [3]. Such a model is taken to be like Llama otherwise,
            too: without biases, without dropout, with rotated positions instead of a table of them.
        tied: Whether embedding and head share their matrix.
        experts: What its layers have in place of one feed-forward network; none in a dense model.
        latent: How its keys and values are made, if not from the residual stream.
        window: How many tokens a query sees at most, itself among them; 0 where it sees all before it.
        windowed: How many layers have that window; the others see all.
        chunked: The sequence lies in chunks of so many tokens, and a query sees those of its own chunk.

    >>> gpt3 = Sizes(layers=96, hidden=12288, heads=96, ffn=4 * 12288, vocab=51200, seq=2048)
    >>> llama = Sizes(80, 8192, 64, 28672, 128256, 8192, kv_heads=8, gated=True, tied=False)
    >>> gpt3.parameters, llama.parameters
    (174615822336, 70553698304)
    >>> mixtral = Sizes(32, 4096, 32, 14336, 32000, 4096, 8, gated=True, tied=False, experts=Experts(8, 2, 14336))
    >>> mixtral.parameters, mixtral.active_parameters
    (46702788608, 12879921152)
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    head_width: int | None = None
    gated: bool = False
    tied: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    window: int = 0
    windowed: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "kv_heads", "head_width")
        faults = [
            f"{name} is {size}, it must be at least 1"
            for name in names
            if (size := getattr(self, name)) is not None and size < 1
        ]
        if not faults and self.heads % self.key_heads:
            faults.append(
                f"kv_heads is {self.kv_heads}, which must divide heads, {self.heads}: "
                "each head of keys serves as many heads of queries"
            )
        if not faults and self.head_width is None and self.latent is None and self.hidden % self.heads:
            faults.append(
                f"heads is {self.heads}, which must divide hidden, {self.hidden}: each head is hidden / heads wide"
            )
        if self.experts is not None and self.experts.dense_layers >= self.layers:
            faults.append(
                f"dense layers are {self.experts.dense_layers} of {self.layers} layers: at least one must have experts"
            )
        if self.window < 0 or not 0 <= self.windowed <= self.layers:
            faults.append(f"{self.windowed} of {self.layers} layers have a window of {self.window} tokens")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def seen_share(self) -> float:
        """The share of causal attention's scores that are computed, the mean over layers.

        Without windows a sequence has s^2 / 2 scores, with one of w tokens s w - w^2 / 2, in chunks of w s w / 2.

        >>> Sizes(2, 64, 8, 256, 1000, 1024, window=256, windowed=1).seen_share
        0.71875
        """
        width = min(self.window, self.seq)
        if not width:
            return 1.0
        rest = self.seq % width
        seen = self.seq * width - rest * width + rest**2 if self.chunked else 2 * self.seq * width - width**2
        return 1.0 - self.windowed / self.layers * (1.0 - seen / self.seq**2)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def query_width(self) -> int:
        """Width of all queries together: a d."""
        if self.latent is not None:
            return self.heads * (self.latent.plain + self.latent.rotated)
        return self.heads * self.head_width if self.head_width else self.hidden

    @property
    def key_width(self) -> int:
        """Width of all keys together: k d."""
        return self.query_width if self.latent else self.query_width * self.key_heads // self.heads

    @property
    def value_width(self) -> int:
        """Width of all values together: k d."""
        return self.heads * self.latent.value if self.latent else self.key_width

    @property
    def result_width(self) -> int:
        """Width of what attention gives: a d."""
        return self.heads * self.latent.value if self.latent else self.query_width

    @property
    def dense_layers(self) -> int:
        """Layers without experts, the first ones, in a model that has experts."""
        return self.experts.dense_layers if self.experts else 0

    @property
    def dense(self) -> Sizes:
        """The model as if no layer had experts: what its dense layers are like."""
        return replace(self, experts=None)

    @property
    def ffn_width(self) -> int:
        """The width of the feed-forward networks that a token meets: f, or j g + u with experts."""
        return self.experts.active if self.experts else self.ffn

    @property
    def attention_products(self) -> tuple[int, ...]:
        """Numbers in the matrices of attention: h (a d + 2 k d) and a d h [4]; latent ones as [8] has them."""
        if self.latent is not None:
            return self.latent.products(self.hidden, self.heads)
        return self.hidden * (self.query_width + 2 * self.key_width), self.hidden * self.query_width

    @property
    def layer_matrices(self) -> int:
        """Numbers of a layer's matrices that a token meets: 2 h (a d + k d) + 2 h f, or 3 h f with a gate [3] [4].

        With experts j g + u in place of f, and the router's h e [5].
        """
        router = self.hidden * self.experts.count if self.experts else 0
        return sum(self.attention_products) + router + self._network(self.ffn_width)

    def _network(self, width: int) -> int:
        """Numbers in the matrices of feed-forward networks that are so wide together."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """A layer's parameters in experts among which the router chooses: 2 h e g, or 3 h e g with a gate."""
        return self._network(self.experts.count * self.experts.width) if self.experts else 0

    @property
    def missed_parameters(self) -> int:
        """Those of a layer's experts that a token does not meet."""
        if self.experts is None:
            return 0
        return self.expert_parameters - self._network(self.experts.per_token * self.experts.width)

    @property
    def layer_parameters(self) -> int:
        """A layer's parameters: its matrices, with 9 h + f of norms and biases [1], or 2 h in a gated model.

        With k = a, d = h / a and f = 4 h these are the published 12 h^2 + 13 h. With experts all of them count.
        """
        small = 2 * self.hidden if self.gated else 9 * self.hidden + self.ffn_width
        if self.latent is not None:
            small += self.latent.queries + self.latent.keys
        return self.layer_matrices + self.missed_parameters + small

    @property
    def table_parameters(self) -> int:
        """The matrix of the embedding, as of the head: V h."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The embedding with its table of positions, V h + s h [1]; V h in a gated model."""
        return self.table_parameters + (0 if self.gated else self.seq * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters."""
        own = 0 if self.tied else self.table_parameters
        layers = (self.layers - self.dense_layers) * self.layer_parameters
        return layers + self.dense_layers * self.dense.layer_parameters + self.embedding_parameters + own

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: all, but for experts that it does not go to."""
        return self.parameters - (self.layers - self.dense_layers) * self.missed_parameters

    def matrix_flops(self, tokens: int) -> int:
        """FLOPs of a layer's matrices in a forward pass: two for each number and token [1]."""
        return 2 * tokens * self.layer_matrices

    def score_flops(self, tokens: int) -> int:
        """FLOPs of a layer's attention scores in a forward pass: 4 b s^2 a d, masked ones too [1].

        Where windows leave some out, it is the mean over layers.
        """
        return int(2 * tokens * self.seq * (self.query_width + self.result_width) * self.seen_share)

    def head_flops(self, tokens: int) -> int:
        """FLOPs of the logits in a forward pass: 2 b s h V [1]."""
        return 2 * tokens * self.hidden * self.vocab

    def model_flops(self, sequences: int) -> int:
        """FLOPs of a training step without anything computed again, forward and backward: three forward passes.

        With k = a and f = 4 h these are 72 B s l h^2 (1 + s / 6 h + V / 12 l h), equation 3 of [1] without its
        recomputed part.
        """
        tokens = sequences * self.seq
        layers = (self.layers - self.dense_layers) * self.matrix_flops(tokens)
        layers += self.dense_layers * self.dense.matrix_flops(tokens) + self.layers * self.score_flops(tokens)
        return 3 * (layers + self.head_flops(tokens))

    def kept_bytes(
        self, tokens: int, recompute: str = "none", tensor: int = 1, along: bool = True, scores: bool = True
    ) -> float:
        """Bytes that a layer keeps on a rank between its forward and backward pass [2], at 16 bits.

            whole, split along the sequence      s b h (34 + 5 a s / h) / t         tables 2 and 4 of [2]
            whole, split by tensors only         s b h (10 + 24 / t + 5 a s / (h t))
            selective                            the same without 5 a s / h
            full                                 2 s b h, the layer's input; split along the sequence 2 s b h / t

        Other widths: of the 34 h are 4 k d keys and values, 3 a d queries and result, 4 f the feed-forward layer, and
        h the rest; with a gate (and no dropout) 6 f, and 2 h fewer masks. With experts f is j g + u, and each of the j
        keeps what came to it and what it gave, 4 j h; the router's e numbers are left out.

        Args:
            tokens: b s of this rank.
            recompute: One of `RECOMPUTE`.
            tensor: t, ranks that share the layer's matrices.
            along: Whether what lies between matrices is split along the sequence (sequence parallelism).
            scores: Whether the scores are kept in memory at all; fused attention never does.

        >>> gpt3 = Sizes(96, 12288, 96, 4 * 12288, 51200, 2048)
        >>> gpt3.kept_bytes(2048) / (2048 * 12288), gpt3.kept_bytes(2048, "selective", 8) / (2048 * 12288)
        (114.0, 4.25)
        """
        hidden = self.hidden
        if recompute == "full":
            return 2 * tokens * hidden / (tensor if along else 1)
        outside = (8 if self.gated else 10) * hidden
        inside = 2 * (self.query_width + self.key_width + self.value_width + self.result_width)
        inside += (6 if self.gated else 4) * self.ffn_width
        if self.experts is not None:
            outside += 4 * self.experts.per_token * hidden
        if self.latent is not None:
            outside += 2 * (self.latent.queries + self.latent.keys + self.latent.rotated)
        table = 5 * self.heads * self.seq if scores and recompute == "none" else 0
        return tokens * (outside / (tensor if along else 1) + (inside + table) / tensor)

    def head_bytes(self, tokens: int, tensor: int = 1) -> float:
        """Bytes that the head keeps on a rank: 4 s b h (1 + V / h) / t, logits in 32 bits (section 4.3 of [2])."""
        return 4 * tokens * (self.hidden + self.vocab) / tensor

    def embedding_bytes(self, tokens: int, tensor: int = 1) -> float:
        """Bytes that the embedding keeps on a rank: the dropout mask, s b h / t [2]; none in a gated model."""
        return 0.0 if self.gated else tokens * self.hidden / tensor
