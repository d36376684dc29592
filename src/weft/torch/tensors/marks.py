"""The attributes that weft sets on tensors and modules of the script, and what they are where nobody has set them.

Marks of tensors are read for every tensor in a step. So they are written out where they are used, and their defaults
are attributes of the class ``Tensor``: both are faster than a lookup by name. `noted` marks a
tensor's writes, to see later if it has been written since.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.torch.pytorch.private import version

OF_TENSORS = {
    "_weft_value": None,  # in a microbatch: the ``Value`` by which the ranks know the tensor
    "_weft_owner": None,  # the partition that holds a parameter, or a buffer that the model writes
    "_weft_buffer": False,  # whether the tensor is a buffer of a model that is split
    "_weft_made": None,  # in the watching pass of a trace: who made the tensor, a ``Made``
    "_weft_operation": None,  # in the watching pass: the ``Operations`` and the number of the one that made the tensor
    "_weft_cut": None,  # on a parameter of which this rank holds a part: how it was cut, over which ranks
    "_weft_away": None,  # on a parameter that has no values just now: who gathers it, see ``tensors.cut_weights``
    "_weft_blocks": None,  # on the result of a sharded fused projection: the sizes of its blocks
    "_weft_window": None,  # on sharded positions: the ``Window`` of them that is still to be computed
    "_weft_reach": None,  # on a mask: how far blocks of positions see by it, see ``context_parallel.windows``
    "_weft_entered": None,  # on sharded positions that linears take: how often written, what all of these share
    "_weft_tags": None,  # while it is found out what can be split: the linears that a sharded tensor comes from
    "_weft_spread": False,  # whether each rank of axis tp has a part of it, see ``tensor_parallel.sharded_activations``
    "_weft_placed": False,  # in a reference run: whether the tensor would have a place in a split step
}
"""Names and defaults. What stands for a parameter or a filled cache of another rank has ``_weft_of`` and
``_weft_device`` besides, and ``_weft_forgotten``."""

for _name, _default in OF_TENSORS.items():
    setattr(Tensor, _name, _default)

CUT, AWAY, BLOCKS, TAGS, WINDOW = "_weft_cut", "_weft_away", "_weft_blocks", "_weft_tags", "_weft_window"
REACH = "_weft_reach"
MARK = "_weft_partition"
"""On a module: the partition where the script wants it, and whether by ``set_partition``."""
WHOLE = "_weft_whole"
"""On a module: whether the script wants its weights whole on every rank, or as a text how it wants them cut; and
whether by ``set_tensor_parallelism``."""
CHECKPOINTED = "_weft_checkpoint"
"""On a module whose calls are checkpointed: how."""
PLAIN_FORWARD = "_weft_plain_forward"
"""On such a module: the ``forward`` that the script had set on it."""
RECIPES = "_weft_recipes"
"""On a module with delayed parameters: how to make each."""
FEW_SAMPLES = "_weft_few_samples"
"""On a model: that the warning about too few samples for BatchNorm was given."""
BUILT = "_weft_built"
"""On a module of a registered class: what it was built from, so that another one can stand for it."""
PIECES = "_weft_pieces"
"""On the memory of a shard: what was taken of it, see ``tensor_parallel.pieces``."""
WRAPPED = "_weft_optimizer"
"""On an optimizer of PyTorch: the DistributedOptimizer around it, which lives as long."""
PLACE = "_weft_place"
"""On a variable of Keras: the module that has its value, and under which name."""
FOLLOWS = "_weft_follows"
"""On the class of such variables."""
WRAPPER = "_weft_wrapped"
"""On a module: its ``smdistributed`` model, which holds the split and so lives as long as the module."""


def unwritten(tensor: Tensor) -> Callable[[], bool]:
    """A question for later: has the tensor not been written since this call?

    Writes into inference tensors are not counted by PyTorch, so their content is compared.
    """
    if tensor.is_inference() and tensor.device.type != "meta" and tensor.layout == torch.strided:
        content = tensor.clone()
        return lambda: (
            content.shape == tensor.shape and bool(((content == tensor) | (content != content)).all())
        )
    count = version(tensor)
    return lambda: version(tensor) == count


def noted(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor]]:
    """The buffers of a module by name, each as :func:`is_new` asks for it later."""
    return {name: (b, version(b), b.detach().clone()) for name, b in module.named_buffers()}


def is_new(buffer: Tensor, old: Tensor, old_version: int, content: Tensor) -> bool:
    """True if a buffer was replaced or written; batch norm's kernels do not count their writes as versions."""
    if buffer is not old or version(buffer) != old_version:
        return True
    return buffer.device.type != "meta" and not torch.equal(buffer, content)
