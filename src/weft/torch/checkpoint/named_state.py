"""The part of a checkpoint that one rank stores and takes back, by names that do not depend on the split.

model/<name>                    parameters and buffers, names as in the wrapped module
optimizer/<name>/<key>          the optimizer's tensors for the parameter <name>; under the key fp32_master the copy
                                of the parameter that it steps on, if it has one. A second optimizer's are under
                                optimizer.1, and so on
ranks/<rank>/...                random states, and the states of `also`
user/...                        tensors of the user's content
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.checkpoint.shard import Part
from weft.communication.serialise import Decoder
from weft.errors import CheckpointError, UsageError
from weft.torch.model import DistributedModel
from weft.torch.optimizer import MASTERS, DistributedOptimizer
from weft.torch.replicas.full_tensors import full_tensor, like
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, mix
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values
from weft.torch.tensors.pytree import named_plain_tensors
from weft.torch.tensors.state_names import name_faults, shape_faults, shapes_of
from weft.untrusted import translated

Reader = Callable[[str], Tensor]


class Tensors(Protocol):
    """Saved tensors, of which each can be checked before the first one is put into the model."""

    def read(self, name: str) -> Tensor: ...
    def check(self, name: str) -> None: ...


def named_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The state of a module: tensors by their first name, further names of the same tensors, and what is no tensor.

    Of a tensor that is made of others these are in it: ``weight.scale``, say.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    objects: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            objects[name] = value
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors |= named_plain_tensors(value, name)
    return tensors, aliases, objects


def state_names(model: DistributedModel | None) -> set[str]:
    """All names of a model's tensors, tied ones too."""
    if model is None:
        return set()
    tensors, aliases, _ = named_state(model.module)
    return {*tensors, *aliases}


def owner_of(model: DistributedModel, name: str) -> int:
    """The partition that stores a tensor or a module's extra state: its owner, else the first."""
    if name in model.owners:
        return model.owners[name]
    above = name.rpartition(".")[0]
    if above in model.owners:  # what a tensor is made of
        return model.owners[above]
    return next((at for other, at in model.owners.items() if above and other.startswith(f"{above}.")), 0)


def pipeline_position(session: Session) -> int:
    return 0 if session.pipeline is None else session.pipeline.rank


def add_model(part: Part, session: Session, model: DistributedModel) -> None:
    """Add this rank's parameters and buffers; collective over the replicas if they share parameters."""
    here = pipeline_position(session)
    tensors, aliases, objects = named_state(model.module)
    mine = {name: value for name, value in tensors.items() if owner_of(model, name) == here}
    part.tensors |= {f"model/{name}": full_tensor(value) for name, value in mine.items()}
    encoder = saved_values.encoder(part.tensors, f"extra-{session.rank}")
    extra = {
        name: encoder.encode(value, f"the extra state {name}")
        for name, value in objects.items()
        if owner_of(model, name) == here
    }
    part.content["extra"] = extra
    if here == 0:
        plan = None if model.plan is None else model.plan.to_json()
        part.content["model"] = {"class": type(model.module).__qualname__, "aliases": aliases, "plan": plan}


def torch_optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of PyTorch that an optimizer of weft's wraps, or the optimizer itself."""
    found: torch.optim.Optimizer = (
        optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    )
    return found


def own_state(optimizer: Any) -> tuple[dict[str, Any], Any]:
    """An optimizer's state on this rank, and what else it has, as :func:`load_optimizer` takes them."""
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer.own_state()
    return optimizer.state_dict(), None


def parameter_names(model: DistributedModel, optimizer: Any) -> list[list[str]]:
    """The names of an optimizer's parameters, by group."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    groups = torch_optimizer_of(optimizer).param_groups
    flat = iter(
        optimizer.weights()
        if isinstance(optimizer, DistributedOptimizer)
        else [p for group in groups for p in group["params"]]
    )
    found = [[names.get(id(next(flat)), "") for _ in group["params"]] for group in groups]
    unknown = sum(name == "" for group in found for name in group)
    if unknown:
        raise UsageError(
            f"{unknown} parameters of the optimizer are not the model's: build it from model.parameters()"
        )
    return found


def section_of(number: int) -> str:
    """The name under which a save has the optimizer of that number."""
    return f"optimizer.{number}" if number else "optimizer"


def list_of(optimizers: Any) -> list[Any]:
    """One optimizer, several, or none, as a list."""
    return (
        list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers] * (optimizers is not None)
    )


def add_optimizer(
    part: Part, session: Session, model: DistributedModel, optimizer: Any, number: int = 0
) -> None:
    """Add the optimizer's state for this rank's parameters, by their names; on the first partition the groups too.

    Of several ranks that have the same state one adds it. ``number``: which of the model's optimizers it is.
    """
    section = section_of(number)
    groups = parameter_names(model, optimizer)
    flat = [name for group in groups for name in group]
    wrapped = isinstance(optimizer, DistributedOptimizer)
    first = session.position("rdp") == session.position("tp") == 0
    saved = optimizer.saved() if wrapped else [first] * len(flat)
    copied = optimizer.saved(parts=True) if wrapped else saved
    whole = optimizer.whole_states if wrapped else ()
    state_dict, more = own_state(optimizer)
    here = pipeline_position(session)
    encoder = saved_values.encoder(part.tensors, f"{section}-{session.rank}")
    values: dict[str, Any] = {}
    for index, entry in sorted(state_dict["state"].items()):  # ranks gather in the same order
        name = flat[index]
        if owner_of(model, name) != here:
            continue
        weight = model.module.get_parameter(name)
        tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
        for key, value in tensors.items():
            copy_ = key == MASTERS
            full = full_tensor(value, weight) if copy_ or index not in whole else value
            if copied[index] if copy_ else saved[index]:
                part.tensors[f"{section}/{name}/{key}"] = full
        if saved[index]:
            values[name] = {
                key: encoder.encode(value, f"the optimizer's {key} of {name}")
                for key, value in entry.items()
                if key not in tensors
            }
    part.content[f"{section}_values"] = values
    if here == 0 and first:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]]
        part.content[section] = {
            "class": type(torch_optimizer_of(optimizer)).__qualname__,
            "more": encoder.encode(more, "the loss scale"),
            "groups": [
                {"params": names, "values": encoder.encode(group, "the optimizer's settings")}
                for names, group in zip(groups, settings, strict=True)
            ],
        }


def add_rank(part: Part, session: Session, also: Mapping[str, Any], allow_pickle: bool) -> None:
    """Add what belongs to this rank alone: random states, and the states of the objects in ``also``."""
    encoder = saved_values.encoder(part.tensors, f"ranks/{session.rank}", allow_pickle)
    which = TORCH | PYTHON | (NUMPY if "numpy.random" in sys.modules else 0)
    states = [encoder.encode(state, "the random state") for state in session.streams.capture(which)]
    objects = {name: encoder.encode(value.state_dict(), f"also[{name!r}]") for name, value in also.items()}
    part.content["rank"] = {
        "pp": pipeline_position(session),
        "rdp": session.position("rdp"),
        "tp": session.position("tp"),
        "random": states,
        "also": objects,
    }


# --- taking it back -------------------------------------------------------------------------------------------


def check_model(model: DistributedModel, saved: Mapping[str, tuple[int, ...]], strict: bool) -> list[str]:
    """Names and shapes of a save that do not fit the model.

    ``saved``: shapes by name, with the further names of tied tensors; of a tied tensor in the model one name is enough.
    """
    tensors, aliases, _ = named_state(model.module)
    found = shape_faults(saved, shapes_of(tensors))
    if strict:
        there = {aliases.get(name, name) for name in saved}
        missing = [name for name in tensors if name not in there]
        found += name_faults(missing, [name for name in saved if name not in tensors and name not in aliases])
    return found


def local_targets(session: Session, model: DistributedModel) -> Iterator[tuple[list[str], Tensor]]:
    """The tensors that this rank holds, each with its names, the first name first."""
    tensors, aliases, _ = named_state(model.module)
    for name, value in tensors.items():
        if model.is_local(name) and model.is_local(name.rpartition(".")[0]):  # or what has it in it
            yield [name, *(alias for alias, first in aliases.items() if first == name)], value


def _saved_targets(
    session: Session, model: DistributedModel, names: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """The tensors that this rank holds and a save has, by the names that it has for them."""
    return [
        (name, target)
        for known, target in local_targets(session, model)
        if (name := next((name for name in known if name in names), None)) is not None
    ]


def check_tensors(
    session: Session, model: DistributedModel, names: Mapping[str, Any], saved: Tensors
) -> None:
    """:class:`CheckpointError` if a tensor that this rank needs is altered."""
    for name, _ in _saved_targets(session, model, names):
        saved.check(name)


def load_model(session: Session, model: DistributedModel, names: Mapping[str, Any], saved: Tensors) -> None:
    """Fill this rank's tensors with saved ones, which :func:`check_tensors` has looked at."""
    with torch.no_grad():
        for name, target in _saved_targets(session, model, names):
            target.copy_(like(saved.read(name), target))
    for optimizer in model.optimizers:
        optimizer.forget_masters()
    torch.clear_autocast_cache()  # the tracing of a step inside of autocast has left casts of the former values


def load_extra(session: Session, model: DistributedModel, extra: Mapping[str, Any]) -> None:
    """Give modules of this rank their saved extra states; before the split all modules."""
    for name, value in extra.items():
        if not model.partitioned or owner_of(model, name) == pipeline_position(session):
            model.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def check_optimizer(model: DistributedModel, optimizer: Any, saved: Mapping[str, Any]) -> list[str]:
    """Faults of a saved optimizer that does not fit the script's."""
    mine = type(torch_optimizer_of(optimizer)).__qualname__
    if saved["class"] != mine:
        return [f"the optimizer was a {saved['class']}, the script has a {mine}"]
    groups = parameter_names(model, optimizer)
    theirs = [group["params"] for group in saved["groups"]]
    if len(groups) != len(theirs):
        return [f"the optimizer had {len(theirs)} groups of parameters, the script's has {len(groups)}"]
    return [
        f"group {number} of the optimizer had other parameters: "
        + ", ".join(sorted(set(mine_here) ^ set(theirs_here))[:5])
        + " (with load_optimizer=False it begins anew)"
        for number, (mine_here, theirs_here) in enumerate(zip(groups, theirs, strict=True))
        if set(mine_here) != set(theirs_here)
    ]


@contextmanager
def groups_loaded(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """The groups' settings, such as the learning rate, are these in the block, and after it unless it raises.

    They come before the first step, as schedulers read them there.
    """
    taking = torch_optimizer_of(optimizer)
    before = [
        {key: value for key, value in group.items() if key != "params"} for group in taking.param_groups
    ]
    for group, content in zip(taking.param_groups, groups, strict=True):
        group.update(content)
    try:
        yield
    except BaseException:
        for group, former in zip(taking.param_groups, before, strict=True):
            for key in group.keys() - former.keys() - {"params"}:
                del group[key]
            group.update(former)
        raise


def read_optimizer_state(
    model: DistributedModel, optimizer: Any, keys: Mapping[str, Mapping[str, str]], values: Mapping[str, Any],
    read: Reader,
) -> dict[str, Any]:  # fmt: skip
    """The saved optimizer state of this rank's parameters, as the optimizer takes it.

    ``keys``: for each parameter the paths of its tensors, by the keys in its state. ``values``: what is no tensor.
    """
    flat = [name for group in parameter_names(model, optimizer) for name in group]
    content = torch_optimizer_of(optimizer).state_dict()
    content["state"] = {}
    wrapped = isinstance(optimizer, DistributedOptimizer)
    mine, held = (optimizer.mine(), optimizer.held()) if wrapped else ([True] * len(flat),) * 2
    whole = optimizer.whole_states if wrapped else ()
    for number, name in enumerate(flat):
        paths = keys.get(name, {})
        if not mine[number]:  # a copy of a part may be here, and the state elsewhere
            paths = {key: path for key, path in paths.items() if key == MASTERS and held[number]}
        own = values.get(name, {}) if mine[number] else {}
        if model.is_local(name) and (paths or (mine[number] and (name in keys or name in values))):
            weight = model.module.get_parameter(name)
            entry = {key: read(path) for key, path in paths.items()}
            if number not in whole:
                entry = {key: like(value, weight) for key, value in entry.items()}
            content["state"][number] = {**entry, **own}
    return content


def try_state(optimizer: Any, content: Mapping[str, Any]) -> None:
    """Check that the optimizer takes a state; :class:`CheckpointError` if not. The optimizer keeps its own state."""
    taking, before = torch_optimizer_of(optimizer), torch_optimizer_of(optimizer).state_dict()
    try:
        with translated(_REFUSED, CheckpointError):
            state = {
                n: {k: v for k, v in entry.items() if k != MASTERS} for n, entry in content["state"].items()
            }
            state = {number: entry for number, entry in state.items() if entry}
            taking.load_state_dict({"state": state, "param_groups": content["param_groups"]})
    finally:
        taking.load_state_dict(before)


_REFUSED = "the optimizer does not take the state that was saved"


def load_optimizer(optimizer: Any, content: dict[str, Any], more: Any) -> None:
    """Give an optimizer its state from :func:`read_optimizer_state`. ``more``: what else the optimizer had saved."""
    with translated(_REFUSED, CheckpointError):
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.load_own_state(content, more)
        else:
            optimizer.load_state_dict(content)


def find_rank_content(session: Session, ranks: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The content that the rank at this place of the mesh had stored, and True; or that of the nearest rank, and
    False."""
    here, replica, part = pipeline_position(session), session.position("rdp"), session.position("tp")
    by_place = {(content["pp"], content["rdp"], content.get("tp", 0)): content for content in ranks.values()}
    for place in itertools.product((here, 0), (replica,), (part, 0)):
        if place in by_place:
            return by_place[place], True
    return by_place.get((here, 0, 0), by_place.get((0, 0, 0))), False


def read_random_states(session: Session, saved: Any, decoder: Decoder) -> list[Any]:
    """The saved random states, fitted to the generators of this rank; some error if that is not possible."""
    states: list[Any] = [decoder.decode(state) for state in saved]
    if states[0] is not None:
        present = session.streams.capture(TORCH)[0]  # another number of generators where the devices differ
        states[0] = [*states[0], *present[len(states[0]) :]][: len(present)]
    if states[2] is not None and "numpy.random" not in sys.modules:
        states[2] = None
    session.streams.check(states)
    return states


def load_random(session: Session, states: list[Any], exact: bool) -> None:
    """Set the random states; a copy of the pipeline that is new gets a stream of its own."""
    session.streams.restore(states)
    if not exact:
        session.streams.seed(mix(session.streams.draw(), session.position("rdp")))


@contextmanager
def also_loaded(also: Mapping[str, Any], states: Mapping[str, Any]) -> Iterator[None]:
    """Objects have these states in the block, and after it unless it raises: then all have their former ones again.

    So they have if one of them refuses its state.
    """
    before: dict[str, Any] = {}
    try:
        for name, target in also.items():
            before[name] = copy.deepcopy(target.state_dict())
            with translated(f"also[{name!r}] does not take the state that was saved", CheckpointError):
                target.load_state_dict(states[name])
        yield
    except BaseException:
        for name, state in before.items():
            with suppress(Exception):  # the one that refused may refuse this too
                also[name].load_state_dict(state)
        raise


def check_also(also: Mapping[str, Any], saved: Mapping[str, Any] | None) -> list[str]:
    """Faults of objects in ``also`` of which the checkpoint has no state."""
    there = {} if saved is None else saved
    return [f"also[{name!r}] was not saved" for name in also if name not in there]


def need_states(also: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``also``, empty for None; :class:`UsageError` for objects without ``state_dict`` or ``load_state_dict``."""
    bad = [
        f"also[{name!r}] is a {type(value).__qualname__}"
        for name, value in (also or {}).items()
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
    ]
    if bad:
        raise UsageError(f"{'; '.join(bad)}: objects in also need state_dict() and load_state_dict()")
    return also or {}
