"""The original's names for tensor parallelism. Which weights are cut over ranks weft finds by itself, in any model."""

from .base import DistributedModule as DistributedModule
from .contexts import set_tensor_parallelism as set_tensor_parallelism
from .contexts import tensor_parallelism as tensor_parallelism
from .contexts import tp_register as tp_register
from .contexts import tp_register_with_module as tp_register_with_module
from .head import DistributedTransformerLMHead as DistributedTransformerLMHead
from .layer import DistributedTransformer as DistributedTransformer
from .layer import DistributedTransformerLayer as DistributedTransformerLayer
from .parts import DistributedAttentionLayer as DistributedAttentionLayer
from .parts import DistributedTransformerOutputLayer as DistributedTransformerOutputLayer
from .plain import DistributedEmbedding as DistributedEmbedding
from .plain import DistributedLinear as DistributedLinear
