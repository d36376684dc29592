"""Where a checkpoint's tensors go, and when.

weights    at once if the model holds values, whole before the split; so nobody reads, copies or saves former ones
states     what the optimizer keeps, several times as much, right after the split, when each rank knows its part
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.checkpoint.agree import gather_faults
from weft.errors import CheckpointError, UsageError
from weft.torch.checkpoint import named_state
from weft.torch.delayed_parameters import has_delayed
from weft.torch.model import DistributedModel
from weft.torch.session.collectives import AllRanks
from weft.torch.session.session import Session

Put = Callable[[], None]


def fill(
    session: Session, model: DistributedModel, names: Mapping[str, Any], saved: named_state.Tensors
) -> None:
    """Fill the tensors that this rank holds, after all were checked; before the split all ranks do this together."""
    damage = []
    try:
        named_state.check_tensors(session, model, names, saved)
    except CheckpointError as error:
        if model.partitioned:
            raise
        damage = [str(error)]
    if not model.partitioned:
        damage = gather_faults(AllRanks(session), damage)
    if damage:
        raise CheckpointError("; ".join(damage))
    named_state.load_model(session, model, names, saved)


def land(model: DistributedModel, weights: Put, states: Mapping[Any, Callable[[], Put]]) -> None:
    """Put a checkpoint into a model and its optimizers, each as early as it can be.

    Args:
        model: The model.
        weights: Puts the weights into the model.
        states: For each optimizer, of DistributedOptimizer's or PyTorch's, what reads and tries its states, and returns
            what puts them there.
    """

    if model.partitioned:
        puts = [read() for read in states.values()]  # read first: what is altered changes nothing then
        weights()
        for put in puts:
            put()
        return
    delayed = has_delayed(model.module)
    if delayed:
        model.register_post_partition_hook(lambda *_: weights())
    else:
        weights()
    for optimizer, read in states.items():
        whole = not delayed and getattr(optimizer, "takes_whole", True)
        Arrival(model, optimizer, partial(_read_and_put, read), whole)


def _read_and_put(read: Callable[[], Put]) -> None:
    read()()


class Arrival:
    """The state that an optimizer gets right after the split; or earlier, if it is asked for it.

    ``put()`` puts it there. ``whole``: whether it can have the states of the whole model until then.
    """

    def __init__(self, model: DistributedModel, optimizer: Any, put: Put, whole: bool) -> None:
        self._put, self._whole = put, whole
        taking = named_state.torch_optimizer_of(optimizer)
        self._handles = [
            model.register_post_partition_hook(lambda *_: self.arrive()),
            taking.register_state_dict_pre_hook(lambda *_: self._asked("state_dict()")),
            taking.register_step_pre_hook(lambda *_: self._asked("step()")),
            taking.register_load_state_dict_pre_hook(lambda *_: self.forget()),
        ]

    def arrive(self) -> None:
        self.forget()
        self._put()

    def forget(self) -> None:
        """Nothing is to come: it has come, or another state was loaded since."""
        for handle in self._handles:
            handle.remove()

    def _asked(self, what: str) -> None:
        if not self._whole:
            raise UsageError(
                f"the optimizer's {what} before the first step would not have what the checkpoint holds: this arrives "
                "when that step has split the model. Call it after that step"
            )
        self.arrive()
