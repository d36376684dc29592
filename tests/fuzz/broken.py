"""Faults put into weft, which the fuzzer has to find; each is named to `run.ranks` and called in its ranks."""

from __future__ import annotations

from typing import Any


def gradient_of_one_unit() -> None:
    """A linear module's gradient is wrong where weft has put the module on partition 1."""
    import torch

    from weft.torch.model import DistributedModel

    original = DistributedModel.finish_partition

    def finish(self: DistributedModel, plan: Any) -> None:
        original(self, plan)
        for name, parameter in self.module.named_parameters():
            if self.owners.get(name) == 1 and parameter.requires_grad and self.is_local(name):
                parameter.register_hook(lambda gradient: torch.mul(gradient, 1.01))
                return

    DistributedModel.finish_partition = finish  # type: ignore[method-assign]


def gradient_of_one_variable() -> None:
    """With TensorFlow, what is applied to the variables of partition 1 is a little too much."""
    from weft.tensorflow.output import StepOutput
    from weft.tensorflow.session.session import session

    original = StepOutput.accumulate

    def accumulate(self: StepOutput, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found * 1.01 if session().position("pp") == 1 else found

    StepOutput.accumulate = accumulate  # type: ignore[method-assign]
