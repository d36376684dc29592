"""A mixture of experts by its sizes: each token goes to some of many feed-forward networks, and to the shared ones.

Letters: e experts, of which a token meets j; each is g wide, and the shared ones together are u wide.

[5] Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", arXiv 1701.06538:
    a router of h e numbers chooses j of e experts for each token.
[6] Jiang et al., "Mixtral of Experts", arXiv 2401.04088: j = 2 of e = 8 in every layer.
[7] Dai et al., "DeepSeekMoE", arXiv 2401.06066: many narrow experts, some of them shared, and a first layer without.
[8] DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1: keys and values come from one narrow vector.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        count: e, experts among which the router chooses.
        per_token: j, those that a token goes to [5].
        width: g, width of each.
        shared: u, width of the experts that every token goes to, together [7].
        dense_layers: Layers before the first one with experts; they have a feed-forward network as other models do.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}, it must be at least {least}"
            for name, value, least in (
                ("experts", self.count, 1), ("experts per token", self.per_token, 1), ("expert ffn", self.width, 1),
                ("shared ffn", self.shared, 0), ("dense layers", self.dense_layers, 0),
            )
            if value < least
        ]  # fmt: skip
        if not faults and self.per_token > self.count:
            faults.append(f"experts per token is {self.per_token}, but there are {self.count} experts")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def active(self) -> int:
        """The width of all the experts that a token meets: j g + u."""
        return self.per_token * self.width + self.shared


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made from one narrow vector [8].

    Attributes:
        queries: Width of the vector that queries are made from; 0 if they are made from the residual stream.
        keys: Width of the vector that keys and values are made from.
        plain: Width of a head's queries and keys without position.
        rotated: Width of their part with position; the keys' one is the same for all heads.
        value: Width of a head's values.
    """

    queries: int
    keys: int
    plain: int
    rotated: int
    value: int

    def __post_init__(self) -> None:
        least = {"queries": 0, "keys": 1, "plain": 1, "rotated": 0, "value": 1}
        faults = [
            f"latent attention: {name} is {value}, it must be at least {low}"
            for name, low in least.items()
            if (value := getattr(self, name)) < low
        ]
        if faults:
            raise ConfigError("; ".join(faults))

    def products(self, hidden: int, heads: int) -> tuple[int, ...]:
        """Numbers in each of its matrices: down and up for queries, down and up for keys and values, out."""
        width = heads * (self.plain + self.rotated)
        queries = (hidden * self.queries, self.queries * width) if self.queries else (hidden * width,)
        return (
            *queries,
            hidden * (self.keys + self.rotated),
            self.keys * heads * (self.plain + self.value),
            heads * self.value * hidden,
        )
