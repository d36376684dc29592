"""Ranks that run different models, steps or inputs end with an error, instead of waiting for each other.

Before the partition all ranks compare their model, and the ranks of a pipeline their step and its arguments. From then
on every rank sends its peers at the beginning of a step what it was called with; they look at it when they have
nothing else to do, so that it costs no time, and before they could wait for ever.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.errors import DivergenceError
from weft.launch.startup import first_difference
from weft.session.step_check import CHANGES, advice_for
from weft.torch.session.collectives import gather_texts
from weft.torch.session.session import Session
from weft.torch.tensors.mini_batch import MiniBatch, named_tensors
from weft.torch.tensors.pytree import nodes_with_paths, plain_tensors_of
from weft.transport.tensor_bytes import to_bytes

log = logging.getLogger("weft")

TENSOR_ADVICE = (
    ". Ranks that hold parts of the same weights must read the same batches: seed, shuffle and shard the data by "
    "weft.rdp_rank() of weft.rdp_size(), not by weft.dp_rank()"
)

SAMPLES = 64
"""So many values of each tensor are compared in every step."""


def describe_model(module: nn.Module) -> str:
    """Class, parameters and buffers of a model, as JSON."""
    content = {"class": type(module).__qualname__}
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            content[f"{kind} {name}"] = describe_tensor(tensor)
    return json.dumps(content)


def describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def describe_call(name: str, batch: MiniBatch, values: bool, changes: Sequence[str] = ()) -> str:
    """The step and its tensor arguments, as JSON, with a digest of some of what is in them; with ``values`` of all.
    ``changes``: of the model, since it was split."""
    content: dict[str, Any] = {"step": name}
    if batch.groups:
        content["the rows of microbatches"] = hashlib.blake2b(
            str(batch.groups).encode(), digest_size=6
        ).hexdigest()
    if changes:
        content[CHANGES] = [len(changes), *changes[-3:]]
    for argument, value in [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]:
        for path, tensor in named_tensors(value, argument):
            content[path] = describe_tensor(tensor)
            if values and tensor.device.type != "meta":
                content[f"the values in {path}"] = digest_of(tensor)
            elif tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous():
                content[f"some values in {path}"] = digest_of(some_of(tensor))
    return json.dumps(content)


def some_of(tensor: Tensor) -> Tensor:
    """At most `SAMPLES` of the values of a contiguous tensor, which has some."""
    return tensor.detach().view(-1)[:: -(-tensor.numel() // SAMPLES)]


def digest_of(tensor: Tensor) -> str:
    """The same short text for the same values."""
    found = hashlib.blake2b(digest_size=6)
    for each in plain_tensors_of(tensor.detach()):
        found.update(to_bytes(each.cpu().contiguous().view(-1)))
    return found.hexdigest()


def describe_inputs(name: str, batch: MiniBatch, changes: Sequence[str] = ()) -> str:
    """The step, how many samples it has, and its arguments that are no tensors: what ranks must agree on if only the
    first one's tensors count."""
    content: dict[str, Any] = {"step": name, "samples": batch.size}
    for argument, value in [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]:
        nodes = nodes_with_paths(value, argument, (list, tuple, Mapping))
        content |= {path: str(node) for path, node in nodes if isinstance(node, (bool, int, float, str))}
    content[CHANGES] = [len(changes), *changes[-3:]]
    return json.dumps(content)


def follow_first(session: Session, own: Any, call: str, step: int) -> Any:
    """The decision of the first of the ranks that split tensors, `own` (JSON) there: they draw the same random numbers.

    ``call``: what the step is called with.

    Raises:
        DivergenceError: One of them was called with something else.
    """
    with session.doing("the inputs of the ranks that split tensors"):
        have = session.agreement.to_compare(cut=False)
        texts = gather_texts(json.dumps([own, call, have]), session.group("tp"))
    answers = [json.loads(text) for text in texts]
    session.agreement.compare(session.peers("tp"), [have for *_, have in answers])
    difference = different_inputs(session, [each for _, each, _ in answers])
    if difference:
        raise DivergenceError(
            f"in step {step} the ranks were called differently: {difference}{TENSOR_ADVICE}"
        )
    return answers[0][0]


def different_inputs(session: Session, calls: Sequence[str]) -> str:
    """The first difference between what the ranks that split tensors are called with (JSON); empty if there is none."""
    by_rank = {rank: {"input": call} for rank, call in zip(session.peers("tp"), calls, strict=True)}
    return first_difference(by_rank).partition(": ")[2]


def compare_start(session: Session, models: list[Any], call: str, outline: str) -> None:
    """All ranks have the same models, those of a pipeline the same call; else :class:`DivergenceError` everywhere.

    ``outline``: what of the call they have in common even if only the inputs of the pipeline's first rank count. Notes
    in the session whether that is so.
    """
    compare_models(session, models, "world")
    wanted = session.settings.inputs
    if wanted == "any":
        with session.doing("the comparison of inputs"):
            calls = gather_texts(call, session.group("mp"))
        session.use_inputs(first=len(set(calls)) > 1)
        if session.first_inputs and session.position("pp") == 0:
            log.info("the ranks of a pipeline have different inputs: the step gets those of the first rank")
    else:
        session.use_inputs(first=wanted == "first")
    _compare(session, {"input": outline if session.first_inputs else call}, "mp")


def compare_models(session: Session, models: list[Any], axis: str) -> None:
    """The ranks along an axis of the mesh have the same models; else :class:`DivergenceError` on all of them."""
    shown = {f"model {number}": describe_model(model.module) for number, model in enumerate(models)}
    _compare(session, shown, axis)


def _compare(session: Session, shown: dict[str, str], axis: str) -> None:
    ranks = session.peers(axis)
    with session.doing("the comparison of models and inputs"):
        texts = gather_texts(json.dumps(shown), session.group(axis))
    difference = first_difference({rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)})
    if difference:
        text = difference.replace("the ranks were started differently", "the ranks differ")
        if "input" in shown:
            calls = [json.loads(text)["input"] for text in texts]
            text += advice_for(calls) if session.mesh.tp == 1 else TENSOR_ADVICE
        raise DivergenceError(text)
