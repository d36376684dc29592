"""Inputs of the step that only the first rank of a pipeline has.

Some scripts load data on that rank only and feed empty tensors elsewhere, or batches of their own. Then the arguments
of the step (labels, too) and what else the model is called with are the first rank's, with a place there: the other
ranks hear the shapes, and get the data where they need it, like that of any other tensor.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn

from weft.errors import DivergenceError
from weft.torch.calls.call_signature import meta_from
from weft.torch.execution.program import Program
from weft.torch.tensors.description import describe_tensor
from weft.torch.tensors.pytree import map_tensors, tensors_in
from weft.transport.channel import SHAPES, Message


def from_first(program: Program, inputs: Any) -> Any:
    """``inputs``, where tensors without a place are replaced by values of the pipeline's first rank; parameters stay.

    Nobody looks at the tensors that the other ranks have in their place.

    Raises:
        DivergenceError: This rank has another number of tensors.
    """
    key = program.tape.key(SHAPES, program.next_call(("the model with the inputs of the first rank",)))

    def is_fresh(tensor: Tensor) -> bool:
        return program.value_of(tensor) is None and not isinstance(tensor, nn.Parameter)

    # A tensor that is given twice may be two elsewhere, so it counts twice.
    fresh = [tensor for tensor in tensors_in(inputs) if is_fresh(tensor)]
    if program.rank == 0:
        made = [tensor.view_as(tensor) for tensor in fresh]
        text = json.dumps([describe_tensor(tensor) for tensor in made])
        for peer in program.pipeline.others():
            program.pipeline.channel.send(peer, Message(key, text=text))
    else:
        message = program.microbatch.receive(0, key, "the shapes of the model's inputs")
        described = json.loads(message.text or "[]")
        if len(described) != len(fresh):
            raise DivergenceError(
                f"the step or the model was called with {len(fresh)} tensors on partition {program.rank}, but with "
                f"{len(described)} on partition 0: pass the same arguments everywhere, empty tensors where there is no "
                "data"
            )
        made = [meta_from(description) for description in described]
    for tensor in made:
        program.placed.place(tensor, 0)
    following = iter(made)

    def put(tensor: Tensor) -> Tensor:
        return next(following) if is_fresh(tensor) else tensor

    return map_tensors(inputs, put)
