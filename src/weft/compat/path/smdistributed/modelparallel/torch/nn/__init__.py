"""``smp.nn``: layers."""

from smdistributed.modelparallel.torch.nn import huggingface as huggingface
from weft.compat.modelparallel.layers import FlashAttentionLayer, FusedLayerNorm
from weft.compat.modelparallel.tensor_parallel import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    DistributedLinear,
    DistributedModule,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
]
