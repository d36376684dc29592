"""Context parallelism: layers of an unmodified model on parts of long sequences, over the ranks of axis ``tp``.

Inside of a layer tensors are PyTorch's ``DTensor``, cut along their positions: the model's own code sees whole shapes,
and each rank computes its positions. Attention gets the keys and values of all. What comes out of a layer looks whole,
and stays sharded up to the next one where it can. Weights are whole on every rank, or cut over others. ``find.find``
tries out which layers can do so, ``apply.cut_sequences`` lets them; both load ``DTensor``.
"""

from .regions import Sequences

__all__ = ["Sequences"]
