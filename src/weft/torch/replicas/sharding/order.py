"""The order in which replicas all-gather layers and reduce-scatter gradients, compared at the end of each step.

FSDP2 takes for granted that replicas call the same layers in the same order, and have gradients of the same parameters.
Where samples decide that, it would join a share of one layer with one of another, and add up gradients of different
parameters. With equal shapes nothing would fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from weft.errors import DivergenceError, UsageError
from weft.torch.pytorch.private import has_tensor_hooks
from weft.torch.replicas.full_tensors import is_sharded
from weft.torch.session.collectives import gather_texts
from weft.torch.session.session import Session

CASTS_SHARES = (
    "a module casts some of its parameters where it runs (self.router.to(torch.float32), say), and replicas share them "
    "(sharded_data_parallel_degree): do that before weft.DistributedModel, or leave sharded_data_parallel_degree out"
)


class SharingOrder:
    """The layers gathered and the gradients reduce-scattered by this rank in a step.

    Args:
        session: The session.
        module: The model, whose parameters are shared by now.
        layers: Those of its modules that are gathered one at a time, by name.
    """

    def __init__(self, session: Session, module: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._session, self._module = session, module
        self._done: list[str] = []
        self._watched: set[int] = set()
        self._shared = {name: is_sharded(parameter) for name, parameter in module.named_parameters()}
        for name, layer in layers.items():
            layer.register_forward_pre_hook(partial(self._note, f"calls {name}"))
        seen: set[nn.Module] = set()
        for layer in (*layers.values(), module):
            _refuse_casts(layer, [each for each in layer.modules() if each not in seen])
            seen |= set(layer.modules())

    def _note(self, text: str, *_: Any) -> None:
        self._done.append(text)

    def begin(self) -> None:
        """A step begins."""
        self._done.clear()
        named = dict(self._module.named_parameters())
        self._refuse_replaced(named)
        for name, parameter in named.items():
            if has_tensor_hooks(parameter) and is_sharded(parameter):
                raise UsageError(
                    f"{name} has a hook of the script for its gradient, which replicas that share parameters never "
                    "call: register it before weft.DistributedModel, which then keeps the parameter whole on each"
                )
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(partial(self._note, f"has a gradient of {name}"))

    def _refuse_replaced(self, named: Mapping[str, nn.Parameter]) -> None:
        """Refuse parameters that FSDP2 would silently replace by those that it has."""
        found = [*(self._shared.keys() ^ named.keys())]
        found += [name for name, each in named.items() if self._shared.get(name) and not is_sharded(each)]
        if found:
            raise UsageError(
                f"{min(found)} was replaced, or tied to another parameter, after weft.DistributedModel, which shares "
                "parameters over the replicas (sharded_data_parallel_degree): do it before, or write values into it"
            )

    def compare(self) -> None:
        """The step has ended; collective over the replicas.

        Raises:
            DivergenceError: Replicas have called other layers, or have gradients of other parameters.
        """
        group = self._session.group("rdp")
        digest = hashlib.blake2b("\n".join(self._done).encode(), digest_size=8).hexdigest()
        if len({*gather_texts(digest, group)}) == 1:
            return
        orders = [text.split("\n") for text in gather_texts("\n".join(self._done), group)]
        first = next(each for each in zip_longest(*orders, fillvalue="does nothing more") if len({*each}) > 1)
        ranks = self._session.peers("rdp")
        shown = ", ".join(f"rank {rank} {text}" for rank, text in zip(ranks, first, strict=True) if text)
        raise DivergenceError(
            f"in step {self._session.steps} replicas that share parameters did not use the same ones in the same "
            f"order, so sums are of different layers: {shown}. Call all layers on every replica (times 0, if their "
            "samples do not need one), or leave out sharded_data_parallel_degree"
        )


def _refuse_casts(layer: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Let a layer's calls fail that cast its parameters: FSDP2 would lose their gradients (PyTorch 2.15 in silence)."""
    found: list[list[torch.dtype]] = []

    def dtypes() -> list[torch.dtype]:
        return [p.dtype for part in parts for p in part._parameters.values() if p is not None]

    def before(*_: Any) -> None:
        found[:] = [dtypes()]

    def after(*_: Any) -> None:
        if found and found.pop() != dtypes():
            raise UsageError(CASTS_SHARES)

    layer.register_forward_pre_hook(before)  # behind FSDP2's, which has brought the whole parameters
    layer.register_forward_hook(after, prepend=True)  # before FSDP2's, which takes them away
