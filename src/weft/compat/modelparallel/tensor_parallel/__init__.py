"""The original's names for tensor parallelism. Which weights are cut over ranks weft finds by itself, in any model."""

from weft.compat.modelparallel.tensor_parallel.base import DistributedModule as DistributedModule
from weft.compat.modelparallel.tensor_parallel.contexts import (
    set_tensor_parallelism as set_tensor_parallelism,
)
from weft.compat.modelparallel.tensor_parallel.contexts import tensor_parallelism as tensor_parallelism
from weft.compat.modelparallel.tensor_parallel.contexts import tp_register as tp_register
from weft.compat.modelparallel.tensor_parallel.contexts import (
    tp_register_with_module as tp_register_with_module,
)
from weft.compat.modelparallel.tensor_parallel.head import (
    DistributedTransformerLMHead as DistributedTransformerLMHead,
)
from weft.compat.modelparallel.tensor_parallel.layer import DistributedTransformer as DistributedTransformer
from weft.compat.modelparallel.tensor_parallel.layer import (
    DistributedTransformerLayer as DistributedTransformerLayer,
)
from weft.compat.modelparallel.tensor_parallel.parts import (
    DistributedAttentionLayer as DistributedAttentionLayer,
)
from weft.compat.modelparallel.tensor_parallel.parts import DistributedEmbedding as DistributedEmbedding
from weft.compat.modelparallel.tensor_parallel.parts import DistributedLinear as DistributedLinear
from weft.compat.modelparallel.tensor_parallel.parts import (
    DistributedTransformerOutputLayer as DistributedTransformerOutputLayer,
)
