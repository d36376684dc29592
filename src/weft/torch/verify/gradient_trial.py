"""A trial of a step that goes back through its models, and compares the gradients of all parameters.

Losses alone show little: while a model is new, most of what it looks at hardly changes them, a mask that it does not
use, say. Gradients of its weights show it. Of each only a sketch stays, so that they take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.backward.autograd import foreign_hooks, graph_nodes, run_autograd
from weft.torch.execution.gradients import Gradients, Tensors, root_gradients
from weft.torch.pytorch.private import call_of, dtypes_of
from weft.torch.tensors.mini_batch import MiniBatch, Piece
from weft.torch.trace.dry_run import Snapshot
from weft.torch.verify.findings import LEAST, LIMITS, LOOSEST, SMALL
from weft.torch.verify.fingerprint import sketch
from weft.torch.verify.whole_batch import Incomparable, Outcome, Trial, shown

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Passed:
    """The losses of one piece of a batch, and the sketches of the parameters' gradients, by a parameter's ``id``."""

    losses: list[float]
    sketches: dict[int, Tensor]


class GradientTrial(Trial):
    """Runs a step forward and back, and leaves nothing behind."""

    def passed(self, batch: MiniBatch, piece: Piece, part: float = 1.0) -> Passed:
        """The losses and gradients of a piece, which is this part of what is compared."""
        self._sketches: dict[int, Tensor] = {}
        self._part = part
        return Passed(self.run(batch, [piece]).losses, self._sketches)

    def differences(self, whole: Passed, parts: Sequence[Passed], weights: Sequence[float]) -> str:
        """The difference of a piece from its parts, each with its weight, that rounding does not explain; else empty.

        Raises:
            Incomparable: They have different numbers of losses, or numbers that are not finite.
        """
        one, several = Outcome(), Outcome()
        one.add(whole.losses)
        sketches: dict[int, Tensor] = {}
        for part, weight in zip(parts, weights, strict=True):
            several.add([weight * loss if weight else 0.0 for loss in part.losses])
            for key, numbers in part.sketches.items() if weight else ():
                sketches[key] = sketches.get(key, torch.zeros_like(numbers)) + weight * numbers
        if self.differ(one, several):
            return f"its loss is {shown(several, one)}"
        name = self._apart(whole.sketches, sketches)
        return f"the gradient of {name} is another one" if name else ""

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        self._snapshot = snapshot
        with ExitStack() as stack:
            for model in self.models:
                if any(map(foreign_hooks, model.module.parameters())):
                    raise Incomparable("the script has hooks on gradients that have grown")
                if model.reducer is not None:
                    stack.enter_context(model.reducer.suspend())
            stack.enter_context(snapshot.restored(self._note))
            yield

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            numbers = sketch(parameter.grad).numbers
            known = self._sketches.get(id(parameter))
            self._sketches[id(parameter)] = numbers if known is None else known + numbers
            parameter.grad = None

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """Go back through the models."""
        roots, given = root_gradients(tensors, grads, self._scale)
        self.note_losses(roots, given)
        if self._scale and any(root.requires_grad for root in roots):
            for node in graph_nodes(roots):
                self._snapshot.set_aside(node)
                self.dtypes |= {kind for kind in dtypes_of(node) if kind.is_floating_point}
            run_autograd(roots, given, keep=keep)

    def _called(self, module: nn.Module) -> Callable[..., Any]:
        """A call of a model with its graph."""
        inner = call_of(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note_autocast()
            return inner(*args, **kwargs)

        return call

    def limit(self) -> float:
        """As for losses. On a GPU products may be less precise than their type, and each shape has its own."""
        convolves = any(isinstance(m, CONVOLUTIONS) for model in self.models for m in model.module.modules())
        tf32 = torch.get_float32_matmul_precision() != "highest" or (
            convolves and torch.backends.cudnn.allow_tf32
        )
        coarse = self.session.device.type == "cuda" and tf32
        return max(super().limit(), LIMITS[torch.float16] if coarse else 0.0)

    def _apart(self, one: dict[int, Tensor], other: dict[int, Tensor]) -> str:
        """The parameter whose gradients differ most, if rounding does not explain that; else empty."""
        limit, worst = min(10 * self.limit(), LOOSEST), ("", 0.0)
        largest = max((float(numbers[-1].sqrt()) for numbers in one.values()), default=0.0)
        for model in self.models:
            for name, parameter in model.module.named_parameters():
                if (numbers := one.get(id(parameter))) is None and id(parameter) not in other:
                    continue
                others = other.get(id(parameter))
                numbers, others = (torch.zeros(9) if each is None else each for each in (numbers, others))
                least = max(float(numbers[-1].sqrt()), SMALL * largest, LEAST * LEAST)
                difference = float((numbers[:-1] - others.to(numbers)[:-1]).norm()) / least
                if not difference <= max(limit, worst[1]):
                    worst = name, difference
        return worst[0]
