"""Changes that a script makes to models between steps: seen at the next step, and taken in or refused.

    hooks, requires_grad, dtype, rates of dropout     taken in: what is known of the units' calls is learned anew
    modules, parameters, forward; on one partition    taken in: replicas average the new parameters, those of the
                                                      first replica, too
    the same, split over partitions                   refused: the plan stands on what the trace saw of the old ones

What is compared before each step is a few flat lists, so that a thousand modules take less than half a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.backward.autograd import has_gradient_hooks
from weft.torch.execution.unit_call import unit_call
from weft.torch.pytorch.private import HOOK_TABLES, PART_TABLES, has_backward_hooks
from weft.torch.replicas.steps import synchronise
from weft.torch.replicas.sync_batch_norm import BatchNorm
from weft.torch.session.divergence import compare_models
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import axes_of

_hooks = itemgetter(*HOOK_TABLES)
Dropout: Any = nn.Dropout.__base__
"""The class of every kind of dropout; PyTorch has no public name for it."""


class Outline:
    """The parts of a model at one moment, to be compared with its parts later.

    Parts that are replaced later stay alive with the outline. ``parameters``: whether parameters are compared; FSDP2
    replaces them by itself.
    """

    def __init__(self, root: nn.Module, parameters: bool = True) -> None:
        self._parts = itemgetter(*(PART_TABLES if parameters else PART_TABLES[:1] * 2))
        self.names = dict(root.named_modules())
        self._tables = [*map(vars, self.names.values())]
        self._forwards = self._find_forwards()
        self._keys, self._values = self._find_parts()
        self.parameters = dict(root.named_parameters())
        self.shards = {name: each for name, each in self.parameters.items() if "tp" in axes_of(each)}
        self._kinds = self._find_kinds()
        self._numbers = self._find_hooks()
        self._dropouts = [module for module in self.names.values() if isinstance(module, Dropout)]
        self._rates = self._find_rates()
        self.normalisers = [module for module in self.names.values() if isinstance(module, BatchNorm)]
        self._known = {
            name: dict(chain.from_iterable(table.items() for table in self._parts(vars(module))))
            for name, module in self.names.items()
        }

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy or pickle of a model has None in the place of an outline."""
        return type(None), ()

    def _find_parts(self) -> tuple[list[str], list[Any]]:
        tables = [*filter(None, chain.from_iterable(map(self._parts, self._tables)))]
        return [*chain.from_iterable(tables)], [*chain.from_iterable(map(dict.values, tables))]

    def _find_forwards(self) -> list[Any]:
        own = [table.get("forward") for table in self._tables]
        kinds: set[Any] = set(map(type, self.names.values()))
        return [*own, *(kind.forward for kind in sorted(kinds, key=id))]

    def _find_kinds(self) -> list[Any]:
        return [(parameter.requires_grad, parameter.dtype) for parameter in self.parameters.values()]

    def _find_hooks(self) -> list[int]:
        """The numbers of all hooks; PyTorch gives no number twice."""
        return [*chain.from_iterable(filter(None, chain.from_iterable(map(_hooks, self._tables))))]

    def _find_rates(self) -> list[float]:
        return [module.p for module in self._dropouts]

    # --- what has changed ---------------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """True if modules, parameters and the modules' forwards are those of that moment."""
        return self.has_its_parts() and self._find_forwards() == self._forwards

    def has_its_parts(self) -> bool:
        """True if modules and parameters are those of that moment, in whatever order."""
        keys, values = self._find_parts()
        same = keys == self._keys and len(values) == len(self._values) and all(map(is_, values, self._values))
        return same or not any(self._changed_parts())

    def is_alike(self) -> bool:
        """True if hooks, kinds of parameters and rates of dropout are those of that moment."""
        return (
            self._find_kinds() == self._kinds
            and self._find_hooks() == self._numbers
            and self._find_rates() == self._rates
        )

    def trains_other_parameters(self) -> bool:
        """True if other parameters need gradients, or have other dtypes."""
        return self._find_kinds() != self._kinds

    def list_replaced(self) -> list[str]:
        """In words, the changes of what :meth:`is_whole` compares."""
        return list(dict.fromkeys(self._differences()))

    def _differences(self) -> Iterator[str]:
        yield from self._changed_parts()
        before = self._forwards
        for number, name in enumerate(self.names):
            if self._find_forwards()[number] != before[number]:
                yield f"the forward of {name or 'the model'} was replaced"
        if self._find_forwards() != before:
            yield "the forward of a class was replaced"

    def _changed_parts(self) -> Iterator[str]:
        for name, module in self.names.items():
            known = self._known[name]
            now = dict(chain.from_iterable(table.items() for table in self._parts(vars(module))))
            for key in dict.fromkeys((*known, *now)):
                path = f"{name}.{key}".lstrip(".")
                if key not in now:
                    yield f"{path} was deleted"
                elif key not in known:
                    yield f"{path} was added"
                elif known[key] is not now[key]:
                    yield f"{path} was replaced"

    def list_altered(self) -> list[str]:
        """In words, the changes of what :meth:`is_alike` compares."""
        found = [
            f"{name} {'needs' if now[0] else 'needs no'} gradient, {str(now[1])[6:]}"
            for (name, _), now, before in zip(
                self.parameters.items(), self._find_kinds(), self._kinds, strict=True
            )
            if now != before
        ]
        if self._find_hooks() != self._numbers:
            found.append(f"{len(self._find_hooks())} hooks instead of {len(self._numbers)}")
        if self._find_rates() != self._rates:
            found.append("other rates of dropout")
        return found

    def new_tensors(self, root: nn.Module) -> Iterator[Tensor]:
        """The parameters that were not there at that moment, and the buffers of modules that were not there."""
        old = {id(parameter) for parameter in self.parameters.values()}
        modules = {id(module) for module in self.names.values()}
        yield from (parameter for parameter in root.parameters() if id(parameter) not in old)
        for module in root.modules():
            if id(module) not in modules:
                yield from module.buffers(recurse=False)


def refuse(outline: Outline, why: str) -> None:
    """Refuse a changed model, with what was replaced, and what to do.

    Raises:
        UsageError: Always.
    """
    found = outline.list_replaced()
    more = f", and {len(found) - 4} more changes" if found[4:] else ""
    raise UsageError(
        f"the model was changed after its first step: {', '.join(found[:4])}{more}. {why}: change the model before its "
        "first step, or keep state = model.state_dict() (on all ranks), build the changed model anew, wrap it, and "
        "load_state_dict(state, strict=False)"
    )


def check_backward_hooks(outline: Outline, units: set[str]) -> None:
    """Refuse backward hooks on a module whose children are on several ranks: no rank has all its gradients."""
    for name, module in outline.names.items():
        above = name
        while above not in units and above:
            above = above.rpartition(".")[0]
        if above not in units and has_backward_hooks(module):
            raise UsageError(
                f"{name or 'the model'} got a backward hook after its first step, but its children are on several "
                "partitions: register the hook before the first step, which keeps the module in one piece, or hooks on "
                "its children"
            )


def refuse_hooks_of_shards(outline: Outline) -> None:
    """Refuse a script's hook for a gradient of which this rank computes a shard."""
    for name, parameter in outline.shards.items():
        if has_gradient_hooks(parameter):
            raise UsageError(
                f"{name} got a hook for its gradient after its first step, but ranks hold shards of it, and the hook "
                "would get a shard's gradient: register the hook before the first step, which keeps the module whole"
            )


def look(session: Session) -> None:
    """Take in, or refuse, what the script has changed in its models since the last step.

    Collective over the replicas if there is something to take in: all replicas must have made the change.
    """
    for model in session.models:
        outline: Outline | None = model.outline
        if outline is None:
            continue
        refuse_hooks_of_shards(outline)
        if not outline.is_whole():
            _renew(session, model, outline)
        elif not outline.is_alike():
            if session.pipeline is not None:
                _relearn(session, model, outline)
            elif model.reducer is not None and outline.trains_other_parameters():
                model.reducer.watch(model.reduced_parameters())
        else:
            continue
        model.outline = Outline(model.module, not model.sharded)


def _renew(session: Session, model: Any, outline: Outline) -> None:
    """Take in other modules or parameters, in a model of one partition."""
    if session.pipeline is not None:
        refuse(outline, "Its parts are on several ranks, as the trace of that step has placed them")
    if model.sharded:
        if outline.has_its_parts():
            return  # parameters are gathered around whatever a module runs
        refuse(outline, "Its parameters are sharded over the ranks")
    model.move(session.device)
    if model.reducer is None:
        return
    model.reducer.votes.agree_on_change()
    with session.doing("a changed model"):
        compare_models(session, [model], "rdp")
        synchronise(session, model, only={id(tensor) for tensor in outline.new_tensors(model.module)})
    model.reducer.watch(model.reduced_parameters())


def _relearn(session: Session, model: Any, outline: Outline) -> None:
    """Forget what is known of units' calls: with other hooks or kinds of parameters they return other tensors."""
    names = [unit.name for unit in model.plan.units]
    check_backward_hooks(outline, set(names))
    for name in names:
        call = unit_call(outline.names[name])
        call.serial = call.pipeline.next_serial()
    session.changes += outline.list_altered()
