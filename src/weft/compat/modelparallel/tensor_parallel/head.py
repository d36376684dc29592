"""A transformer with embeddings and a head over the vocabulary."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.compat.modelparallel.tensor_parallel.base import DistributedModule, items_of
from weft.compat.modelparallel.tensor_parallel.layer import DistributedTransformer
from weft.errors import UsageError

_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models whose first mask was looked at; not every one, for a GPU would be waited for."""


def _check_mask(mask: Tensor) -> None:
    """Raise :class:`UsageError` for a mask that leaves nothing of a sample: it is meant the other way."""
    if mask.device.type != "meta" and bool((mask != 0).all(-1).any()):
        raise UsageError(
            "attention_mask is 1 at every position of a sample, and 1 is a position that is masked here, the opposite "
            "of transformers: pass 1 - attention_mask"
        )


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings of words, positions and, if there are any, token types; a transformer; a head with the words' weight.

    Takes one tuple ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``; with ``add_cross_attention``
    ``(input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels)``. All but
    ``input_ids`` [N, S] may be None. **In ``attention_mask`` [N, S] 1 is a position that is masked**, as in the
    original, and not as in ``transformers``. A ``cross_mask`` is added to the scores, [N, 1, 1, S].

    Gives the scores [N, S, vocabulary], or ``(loss, scores)`` if there are labels [N, S]. Labels of -100 do not count,
    and with ``causal_mask_size`` each position predicts the label of the next. Without ``add_lm_head``: the hidden
    states.

    ``rotary_dim``: attention knows the positions, so they have no embedding. Without ``tie_word_embeddings`` the head
    has a weight of its own; ``lm_head_bias``: whether it has a bias. Other arguments: see
    :class:`DistributedTransformer`.

    Where no layer has a norm before it, there is one after the embeddings, as in BERT. Where none has one after it,
    there is one after the last layer, as in GPT-2.
    """

    any_built: ClassVar[bool] = False
    """Whether this process has built one: then states get its names, see :mod:`.translation`."""

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        rotary_dim: int | None = None,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.add_cross_attention, self.causal_mask_size = add_cross_attention, causal_mask_size
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.num_positions = num_positions
        self.position_embedding = nn.Embedding(num_positions, hidden_size) if rotary_dim is None else None
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        for embedding in (self.word_embedding, self.position_embedding, self.token_type_embedding):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=initializer_range)
        if not pre_layernorm:
            self.embedding_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size,
            attention_dropout_prob, hidden_dropout_prob, activation, layernorm_epsilon, causal_mask_size,
            add_cross_attention, initializer_range, use_normal_initialization, pre_layernorm, post_layernorm,
            rotary_dim=rotary_dim, **options,
        )  # fmt: skip
        if not post_layernorm:
            self.final_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon)
        self.lm_head: nn.Linear | None = None
        if add_lm_head:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=lm_head_bias)
            if tie_word_embeddings:
                self.lm_head.weight = self.word_embedding.weight
            else:
                nn.init.normal_(self.lm_head.weight, std=initializer_range)
        self.norms = (not pre_layernorm, not post_layernorm)
        DistributedTransformerLMHead.any_built = True

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Any:
        """See the class."""
        last = ("cross_states", "cross_mask", "labels") if self.add_cross_attention else ("labels",)
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", *last)
        ids, mask, types, positions, *cross, labels = items_of(self, inputs, names)
        hidden = self._embed(ids, types, positions)
        if mask is not None:
            if self not in _seen:
                _check_mask(mask)
                _seen.add(self)
            mask = mask[:, None, None, :].to(hidden.dtype) * torch.finfo(hidden.dtype).min
        if self.add_cross_attention:
            hidden, *_ = self.transformer((hidden, cross[0], mask, cross[1]))
        else:
            hidden, *_ = self.transformer((hidden, mask))
        if self.norms[1]:
            hidden = self.final_layernorm(hidden)
        if self.lm_head is None:
            return hidden
        scores = self.lm_head(hidden)
        return scores if labels is None else (self._loss(scores, labels), scores)

    def _embed(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        length = ids.shape[1]
        if positions is None and length > self.num_positions:
            raise UsageError(
                f"the sequence has {length} positions, and num_positions is {self.num_positions}"
            )
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(length, device=ids.device)[None]
            hidden = hidden + self.position_embedding(positions)
        elif positions is not None:
            raise UsageError("position_ids are given, and rotary_dim counts positions from 0: pass None")
        if self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise UsageError("token_type_ids are given, and num_token_types is 0: pass None, or raise it")
        if self.norms[0]:
            hidden = self.embedding_layernorm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        if self.causal_mask_size is not None:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
