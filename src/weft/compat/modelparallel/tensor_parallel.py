"""The original's names for tensor parallelism. Which weights are cut over ranks weft finds by itself, in any model, so
most of them change nothing; modules that are replaced by others are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from weft.errors import UsageError
from weft.torch.split.by_hand import set_tensor_parallelism as keep_or_cut
from weft.torch.split.by_hand import tensor_parallelism as split_or_whole


@contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """Let modules built inside be split over ranks, or keep them whole; over one rank nothing is split."""
    with split_or_whole(bool(enabled)):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """Accept that ``module`` may be split over ranks, or keep it whole. Weights that can be cut are found anyway."""
    keep_or_cut(module, bool(enabled))


def tp_register(dist_module: type, *hooks: Any, **named: Any) -> Callable[[type], type]:
    """A decorator that names the replacement of a module that is split, and leaves the module as it is."""
    return lambda module: module


def tp_register_with_module(module_cls: type, dist_module: type, *hooks: Any, **named: Any) -> None:
    """Accept a replacement for a module that is split; no module is split, so none is replaced."""


class DistributedModule(nn.Module):
    """The base of modules that know how to be split."""


class DistributedLinear(nn.Linear):
    """``nn.Linear``."""


class DistributedEmbedding(nn.Embedding):
    """``nn.Embedding``; weights are drawn from a normal distribution with the deviation ``initializer_range``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        deviation = kwargs.pop("initializer_range", 0.02)
        for name in ("_skip_allgather", "_skip_scatter_and_merge"):
            kwargs.pop(name, None)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        if kwargs.get("_weight") is None:
            nn.init.normal_(self.weight, std=deviation)


class _Missing(DistributedModule):
    """A module of the original that weft does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} is not supported: build the layer from torch.nn, whose weights are cut over "
            "ranks as they are"
        )


class DistributedTransformerLMHead(_Missing):
    """Not supported yet."""


class DistributedTransformer(_Missing):
    """Not supported yet."""


class DistributedTransformerLayer(_Missing):
    """Not supported yet."""


class DistributedAttentionLayer(_Missing):
    """Not supported yet."""


class DistributedTransformerOutputLayer(_Missing):
    """Not supported yet."""


def no_hooks(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands for functions that give the hooks by which a layer becomes a tensor-parallel one."""
    raise UsageError(
        "hooks that replace layers are not supported: leave tp_register out, layers are cut over ranks as they are"
    )


def same_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """The state as it is: its names are those of Hugging Face's model always."""
    return state_dict
