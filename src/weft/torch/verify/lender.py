"""A model that no rank can hold, run on the first rank: each unit has its weights for as long as it runs.

The first rank asks the owners for a unit's parameters before it calls the unit, and forgets them afterwards; autograd
keeps nothing, since nothing goes back. So the first rank needs memory for one unit beside its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.calls.placeholders import Placeholder, filled
from weft.torch.pytorch.private import version
from weft.torch.session.session import Session
from weft.torch.tensors.pytree import plain_tensors_of
from weft.transport.channel import BORROWED

END = -1
GOES_BACK = "the step looks at gradients, which takes all of the model in one process"


class Lender:
    """The parameters of other ranks, by unit. All ranks of the first pipeline make one; only the first one asks."""

    def __init__(self, session: Session, models: Sequence[Any]) -> None:
        self._peers, self._group = session.peers("pp"), session.group("pp")
        self._device = session.device
        self._parameters = [
            (parameter, model.owners.get(name, 0))
            for model in models
            for name, parameter in model.module.named_parameters()
        ]
        self._numbers = {id(parameter): number for number, (parameter, _) in enumerate(self._parameters)}

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters of other ranks."""
        return sum(parameter.nbytes for parameter, owner in self._parameters if owner != 0)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module's parameters have their values.

        Raises:
            UsageError: The module has written into some of them, which would be lost.
        """
        with ExitStack() as stack, torch.autograd.graph.saved_tensors_hooks(_forget, _cannot_go_back):
            lent = [each for each in module.parameters() if isinstance(each, Placeholder)]
            for parameter in lent:
                stack.enter_context(filled(parameter, self._ask(parameter)))
            before = [version(parameter) for parameter in lent]
            yield
            if before != [version(parameter) for parameter in lent]:
                raise UsageError("a module writes into its parameters in the forward pass")

    def serve(self) -> None:
        """Send what the first rank asks for, until it needs no more."""
        asked = torch.empty(1, dtype=torch.int64)
        while True:
            dist.recv(asked, self._peers[0], group=self._group, tag=BORROWED)
            if int(asked) == END:
                return
            for each in plain_tensors_of(self._parameters[int(asked)][0]):
                content = each.detach().cpu().contiguous()
                dist.send(content.view(-1).view(torch.uint8), self._peers[0], group=self._group, tag=BORROWED)

    def close(self) -> None:
        """The first rank needs no more."""
        for peer in self._peers[1:]:
            dist.send(torch.tensor([END]), peer, group=self._group, tag=BORROWED)

    def _ask(self, parameter: Tensor) -> list[Tensor]:
        number = self._numbers[id(parameter)]
        owner = self._peers[self._parameters[number][1]]
        dist.send(torch.tensor([number]), owner, group=self._group, tag=BORROWED)
        found = []
        for each in plain_tensors_of(parameter):
            content = torch.empty(each.shape, dtype=each.dtype)
            dist.recv(content.view(-1).view(torch.uint8), owner, group=self._group, tag=BORROWED)
            found.append(content.to(self._device))
        return found


def _forget(tensor: Tensor) -> None:
    """Keep nothing of a tensor that autograd would keep."""


def _cannot_go_back(_: None) -> Tensor:
    raise UsageError(GOES_BACK)
