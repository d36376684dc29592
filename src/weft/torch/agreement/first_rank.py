"""The first rank's weights, states and settings go to all ranks before their first step in common."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import DivergenceError
from weft.launch.startup import first_difference
from weft.torch.session.collectives import gather_tensors, gather_texts
from weft.torch.session.divergence import describe_tensor, digest_of
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values
from weft.torch.tensors.marks import RECIPES
from weft.torch.tensors.pytree import plain_tensors_of

log = logging.getLogger("weft")


def follow_first_rank(session: Session, models: Sequence[Any]) -> None:
    """Give all ranks what the first one has of models that have had no step, of optimizers' states and settings, and of
    loss scales: scripts without a seed, or that load on one rank only. Collective over all ranks.

    Raises:
        DivergenceError: A tensor, or an optimizer's groups of parameters, are not of one shape on all ranks.
    """
    if session.place.world_size == 1:
        session.agreement.begun = True
        return
    gc.collect()  # an optimizer or a copy that nobody holds is gone on some ranks and not yet on others
    for model in models:
        _share_all(session, model)
    agreement = session.agreement
    if not agreement.begun:
        agreement.begun = True
        targets: dict[str, _Target] = {}
        for name, optimizer in agreement.present("optimizer").items():
            sharded = any(model.sharded and optimizer in model.optimizers for model in session.models)
            targets[name] = _of_optimizer(optimizer, optimizer.shares is None and not sharded)
        for name, scaler in agreement.present("scaler").items():
            targets[name] = _Target(scaler.state_dict, scaler.load_state_dict)
        _share_states(session, targets)
        agreement.forget_loads()


def _share_all(session: Session, model: Any) -> None:
    """Give the first rank's values to a model and its copies, unless some ranks alone have copies: averages, say."""
    _share_weights(session, model)
    if len({*gather_texts(str(len(model.copies)), session.group("world"))}) == 1:
        for each in model.copies:
            _share_all(session, each)


class _Target(NamedTuple):
    """Something whose state ranks may have different: what gives it, and what takes it."""

    give: Callable[[], Any]
    take: Callable[[Any], object]


def _of_optimizer(optimizer: Any, whole: bool) -> _Target:
    """The settings of an optimizer; and what it keeps by now, if the rank has the ``whole`` of it.

    Its ``state_dict()`` is not asked: what a checkpoint has for it would arrive, which waits for the split.
    """
    inner = optimizer.optimizer
    weights = [weight for group in inner.param_groups for weight in group["params"]]

    def give() -> Any:
        states = {n: inner.state[w] for n, w in enumerate(weights) if w in inner.state} if whole else {}
        if not all(_travels(value) for entry in states.values() for value in entry.values()):
            states = {}  # of classes of its own; then how often a state was loaded is all that is compared
        groups = ([(k, v) for k, v in g.items() if k != "params" and _travels(v)] for g in inner.param_groups)
        return [dict(group) for group in groups], states

    def take(given: Any) -> None:
        groups, states = given
        for group, settings in zip(inner.param_groups, groups, strict=True):
            group.update(settings)
        if states:
            inner.load_state_dict({"state": states, "param_groups": inner.state_dict()["param_groups"]})
        elif whole and give()[1]:
            inner.state.clear()

    return _Target(give, take)


def _travels(value: Any) -> bool:
    """True if a value can be compared, and sent: numbers, texts and plain tensors, not functions and other objects."""
    if isinstance(value, (list, tuple)):
        return all(map(_travels, value))
    if isinstance(value, Tensor):
        return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return value is None or isinstance(value, (bool, int, float, str))


def _share_states(session: Session, targets: Mapping[str, _Target]) -> None:
    """Give all ranks the first one's states, where some have another one."""
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in targets}
    encoded = {
        name: saved_values.encoder(tensors[name], "state").encode(target.give(), name)
        for name, target in targets.items()
    }
    own = {
        name: [
            content,
            {path: digest_of(each) + describe_tensor(each) for path, each in tensors[name].items()},
        ]
        for name, content in encoded.items()
    }
    group = session.group("world")
    with session.doing("the states that ranks begin with"):
        texts = gather_texts(json.dumps(own), group)
        states = [json.loads(text) for text in texts]
        if any([*each] != [*states[0]] for each in states):
            kinds = {rank: {"optimizers and scalers": ", ".join(each)} for rank, each in enumerate(states)}
            raise DivergenceError(
                f"{first_difference(kinds).partition(': ')[2]}: make the same ones on every rank"
            )
        for name in [
            name for name, first in states[0].items() if any(each[name] != first for each in states)
        ]:
            given = tensors[name] if session.rank == 0 else {}
            content = gather_tensors(given, {}, group, session.peers("world"))
            targets[name].take(saved_values.decoder(content.__getitem__).decode(states[0][name][0]))
            if session.rank == 0:
                log.info("the state of the %s differs between ranks: that of the first rank counts", name)


def _share_weights(session: Session, model: Any) -> None:
    """Give tensors of the model that differ between ranks the first rank's values: scripts without a seed, or that load
    weights on one rank only. Tensors that are still to be made get the first rank's seed. Collective over all ranks."""
    tensors = {
        name: tensor
        for name, tensor in tensors_of(model.module)
        if tensor.layout == torch.strided and tensor.device.type != "meta"
    }
    own = {name: digest_of(tensor) + describe_tensor(tensor) for name, tensor in tensors.items()}
    late = {id(each): each for m in model.module.modules() if (each := m.__dict__.get(RECIPES)) is not None}
    with session.doing("the initial weights"):
        seeds = [recipes.seed for recipes in late.values()]
        texts = gather_texts(json.dumps([own, seeds]), session.group("world"))
        known = [json.loads(text)[0] for text in texts]
        for recipes, seed in zip(late.values(), json.loads(texts[0])[1], strict=False):
            recipes.seed = seed
        differing = [name for name in known[0] if any(each.get(name) != known[0][name] for each in known)]
        for name in differing:
            if not all(each.get(name, "")[12:] == known[0][name][12:] for each in known):
                raise DivergenceError(
                    f"{name} of the model has another shape or dtype on some ranks: build the same model everywhere"
                )
            for each in plain_tensors_of(tensors[name].detach()):
                content = each.cpu().contiguous()
                flat = content.view(-1).view(torch.uint8)
                dist.broadcast(flat, session.peers("world")[0], session.group("world"))
                each.copy_(content)
    if differing:
        for optimizer in model.optimizers:
            optimizer.forget_masters()
        if session.rank == 0:
            log.info(
                "%d of %d tensors of the model differ between ranks (%s, ...): those of the first rank count",
                len(differing), len(tensors), differing[0],
            )  # fmt: skip


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes of a module and those in it, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}".lstrip("."), value
