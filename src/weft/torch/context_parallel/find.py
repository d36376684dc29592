"""Modules that can compute on sharded sequences, found by running the model as the first of ranks that are not there.

Candidates are the layers of the model. Each gets the positions of the first rank. Inside, every function on a tensor in
parts is watched: what fails, needs messages that no rule of weft sends, or loses the parts is a conflict. Then the
module stays whole, with the reason, so do those like it in other layers, and the modules inside of it are tried. The
model is run again until nothing changes. Numbers are garbage meanwhile; shapes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from weft.torch.pytorch.private import (
    capture,
    imagined_mesh,
    is_compiled,
)
from weft.torch.pytorch.private_dtensor import redistributes, take_plain_as_replicated
from weft.torch.pytorch.torch_functions import LIKE
from weft.torch.tensor_parallel.functions import FATAL, answering, name_of
from weft.torch.tensor_parallel.rules import Unsplittable, shard_of, shards_in
from weft.torch.tensor_parallel.search_trial import Collectives, Stop
from weft.torch.tensor_parallel.shard_group import ShardGroup, new_name
from weft.torch.tensor_parallel.sharded_activations import watch
from weft.torch.tensor_parallel.splits import pattern
from weft.torch.tensors.pytree import map_tensors, tensors_in

from .apply import make_full, placeholder, sequence_in, with_shard, written
from .exchange import can_cut, cut
from .regions import BALANCED, Sequences
from .rules import ALONG_POSITIONS, PRODUCTS, Positions, gathered, is_causal
from .scans import KNOWN, know_scans
from .weights import ContextGroup
from .zigzag import fits_zigzag, register_zigzag


def find(
    model: nn.Module, run: Callable[[], Any], size: int, apart: Mapping[str, str] = MappingProxyType({})
) -> Sequences:
    """The modules of ``model`` that can compute on sharded sequences over ``size`` ranks.

    One process does this by itself; no other one takes part.

    Args:
        model: The model, whole, on the CPU or a GPU, or without memory.
        run: Runs the model once on one microbatch, with or without the loss, and leaves nothing behind. It is run
            several times.
        size: How many ranks share a sequence.
        apart: Modules that must get whole sequences, and why.

    Raises:
        UsageError: This PyTorch cannot imagine ranks.
        Exception: Whatever ``run`` raises for the whole model.
    """
    take_plain_as_replicated()
    know_scans([model])
    device = next(model.parameters()).device
    kind = "cpu" if device.type == "meta" else device.type
    with imagined_mesh(size, kind, new_name()) as mesh:
        trial, watcher = Trial(model, apart), Watcher(ShardGroup(mesh, None, 0, size))
        while trial.once(run, watcher):
            pass  # each run keeps more modules whole, or tries another dimension
        order = _order(trial, run, watcher)
        kept, notes = watch(model, run, size, trial.regions())
    return Sequences(size, trial.regions(), dict(trial.whole), order, tuple(kept), notes)


def _order(trial: Trial, run: Callable[[], Any], watcher: Watcher) -> str:
    """``BALANCED``, if positions may be in zigzag blocks; else why not."""
    if not watcher.causal:
        return "there is no causal attention"
    if not redistributes:
        return f"PyTorch {torch.__version__} cannot be told another order"
    size = watcher.shard_group.size
    if not all(fits_zigzag(length, size) for length in trial.lengths):
        return BALANCED  # where lengths allow it
    again, balanced_trial = (
        trial.again(),
        Watcher(ContextGroup(watcher.shard_group.mesh, None, 0, size, balanced=True)),
    )
    register_zigzag(balanced_trial.shard_group)
    again.once(run, balanced_trial)
    return next((f"{name}: {reason}" for name, reason in again.reasons.items()), BALANCED)


class Conflict(BaseException):
    """A module cannot compute on parts; the text says why. No model's own ``except`` takes it."""


class Trial:
    """The modules that are tried, and what has come of it.

    Attributes:
        whole: Modules that stay whole, and why.
        reasons: Why modules could not be cut along the first dimension that was tried.
        apart: Modules that must get whole sequences, and why.
        lengths: How many positions the sequences had.
    """

    def __init__(self, model: nn.Module, apart: Mapping[str, str]) -> None:
        self.model, self.whole, self.apart = model, dict[str, str](), apart
        self._tried = dict.fromkeys(_layers(model, ""), 0)
        self._called: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self._attended: set[str] = set()
        self.lengths: set[int] = set()

    def again(self) -> Trial:
        """Another trial of what has come out of this one."""
        other = Trial(self.model, self.apart)
        other.whole, other._tried = dict(self.whole), dict(self._tried)
        return other

    def _kind(self, name: str) -> Any:
        """The kind of a module; modules of one kind share a fate: their name but for numbers of layers, and what is
        in them."""
        inside = [(own, type(each)) for own, each in self.model.get_submodule(name).named_modules()]
        return pattern(f"{name}."), inside

    def once(self, run: Callable[[], Any], watcher: Watcher) -> bool:
        """Run the model once, as far as it comes without a conflict; whether that changed what is tried."""
        self._called.clear()
        attempts = []
        for name, at in self._tried.items():
            module = self.model.get_submodule(name)
            attempts.append(Attempt(self, name, module, at, watcher))
            attempts[-1].attach()
        try:
            with answering(watcher), watcher.collectives, torch.enable_grad():
                run()
        except Stop:
            return True
        except Exception as error:
            for attempt in attempts:
                attempt.detach()
            with torch.no_grad():
                run()  # raises what the model raises by itself
            if not self._called:
                raise
            name = [*self._called][-1]
            try:
                self.conflict(
                    name, 1, [], f"with what it computes on shards the model fails: {error!r}"[:300]
                )
            except Stop:
                return True
        finally:
            for attempt in attempts:
                attempt.detach()
        return False

    def regions(self) -> dict[str, int]:
        """The modules that the last run found to compute on parts, and the dimension of positions."""
        found = {name: self._called[name] for name in self._tried if name in self._called}
        attended = {dim for name, dim in found.items() if name in self._attended} or {1}
        for name in [name for name, dim in found.items() if dim not in attended]:
            self.whole[name] = self.reasons.get(name, "it can be cut, but not along positions")
            del found[name]
        return found

    def note(self, name: str, dim: int, attends: bool) -> None:
        """The module has computed on parts along a dimension; whether there is attention in it, which tells that these
        are positions."""
        self._called[name] = dim
        self._attended |= {name} if attends else set()

    def conflict(self, name: str, at: int, dims: list[int], reason: str) -> None:
        """The module cannot compute on parts along ``dims[at]``.

        Raises:
            Stop: Always.
        """
        alike = self._kind(name)
        for each in [other for other in self._tried if self._kind(other) == alike]:
            first = self.reasons.setdefault(each, reason)
            if at + 1 < len(dims):
                self._tried[each] = at + 1
            else:
                del self._tried[each]
                self.whole[each] = first
                inside = _layers(self.model.get_submodule(each), f"{each}.")
                self._tried.update(
                    (name, 0) for name in inside if [*self.model.get_submodule(name).children()]
                )
        raise Stop


def _layers(module: nn.Module, prefix: str) -> Iterator[str]:
    """The modules right inside that are tried first: layers of lists, and what holds no list."""
    for name, child in module.named_children():
        path = prefix + name
        if not any(True for _ in child.parameters()):
            continue
        several = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and any(any(each.children()) for each in child)
        )
        if several or any(isinstance(each, nn.ModuleList) for each in child.modules()):
            if several:
                yield from (
                    f"{path}.{n}"
                    for n, each in child.named_children()
                    if any(True for _ in each.parameters())
                )
            else:
                yield from _layers(child, f"{path}.")
        else:
            yield path


class Attempt:
    """Stands for a module's ``forward`` during a trial."""

    def __init__(self, trial: Trial, name: str, module: nn.Module, at: int, watcher: Watcher) -> None:
        self.trial, self.name, self.module, self.at, self.watcher = trial, name, module, at, watcher
        self.own = module.__dict__.get("forward")
        self._inside: list[nn.Module] = []

    def attach(self) -> None:
        """From now on calls of the module come here."""
        self._inside = placeholder(self.module, self.watcher.shard_group)
        self.module.__dict__["forward"] = self

    def detach(self) -> None:
        """The module is as before."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.own is not None:
                self.module.__dict__["forward"] = self.own
            for each in self._inside:
                if each is not self.module:
                    del each.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shard_group = self.watcher.shard_group
        given = sequence_in(args, kwargs)
        dims = [] if given is None else [1, 0] if given.ndim == 3 else [1]
        reason = ""
        if given is None:
            reason = "it gets no tensor of samples, positions and features"
        elif any(map(is_compiled, self.module.modules())):
            reason = "it is compiled"
        elif apart := [
            why for name, why in self.trial.apart.items() if f"{name}.".startswith(f"{self.name}.")
        ]:
            reason = apart[0]
        elif not can_cut(given.shape[dims[self.at]], shard_group.size):
            reason = f"it gets {given.shape[dims[self.at]]} positions, too few for {shard_group.size} ranks"
        if reason or given is None:
            self.trial.conflict(self.name, self.at, dims, reason)
        assert given is not None
        try:
            result = self._on_shard(args, kwargs, given.detach().requires_grad_(), given, dims[self.at])
        except Conflict as conflict:
            self.trial.conflict(self.name, self.at, dims, str(conflict))
        self.trial.lengths.add(given.shape[dims[self.at]])
        self.trial.note(self.name, dims[self.at], self.watcher.attends)
        return result

    def _on_shard(self, args: Any, kwargs: Any, leaf: Tensor, given: Tensor, dim: int) -> Any:
        """The module's result for the first rank's positions.

        Raises:
            Conflict: It cannot be computed so.
        """
        watcher = self.watcher
        watcher.products, watcher.attends = 0, False
        forward = self.own or MethodType(type(self.module).forward, self.module)
        inside = self.module.__dict__.get("forward")
        if type(inside).__name__ == "OnPositions":
            forward = inside
        shard = cut(leaf, dim, watcher.shard_group)
        before = written(shard)
        args, kwargs = with_shard(args, kwargs, given, shard)
        try:
            result = forward(*args, **kwargs)
        except FATAL:
            raise
        except Exception as error:
            raise Conflict(f"with parts of sequences it fails: {error!r}"[:300]) from error
        if before != written(shard):
            raise Conflict("it writes into what it gets")
        shards = [each for each in tensors_in(result) if isinstance(each, DTensor)]
        if not watcher.products:
            raise Conflict("it has no products of matrices")
        if not shards:
            raise Conflict("nothing that it returns is sharded")
        if any(
            isinstance(each, DTensor) for module in self.module.modules() for each in vars(module).values()
        ):
            raise Conflict("it keeps a tensor in an attribute")
        make_full(args, kwargs, watcher.shard_group)
        watcher.check_backward(self.module, shards, leaf)
        return map_tensors(result, lambda each: gathered(each, watcher.shard_group))


class Watcher(Positions):
    """Watches functions on sharded tensors during a trial.

    Attributes:
        products: How many products of matrices there were.
        attends: Whether one of them was attention, or another function that goes along positions.
        causal: Whether there was causal attention.
    """

    def __init__(self, shard_group: ShardGroup) -> None:
        super().__init__(shard_group)
        self.collectives, self.products = Collectives(), 0
        self.attends = self.causal = False
        self._backwards = False

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.products += func in PRODUCTS
        self.attends |= func in ALONG_POSITIONS or func in KNOWN
        self.causal |= func is F.scaled_dot_product_attention and is_causal(args, kwargs)
        before = self.collectives.count
        try:
            result = self.on_shards(func, types, args, kwargs)
        except FATAL:
            raise
        except Unsplittable as reason:
            raise Conflict(f"{name_of(func)} {reason}") from reason
        except Exception as reason:
            raise Conflict(f"{name_of(func)} takes whole sequences") from reason
        if self._backwards:
            return result
        cut_before = any(shard_of(each) is not None for each in shards_in(args, kwargs))
        made = [each.placements[0] for each in tensors_in(result) if isinstance(each, DTensor)]
        lost = any(
            each.is_partial() or (each.is_replicate() and func not in LIKE and cut_before) for each in made
        )
        if lost or self.collectives.count > before:
            raise Conflict(f"{name_of(func)} takes whole sequences")
        return result

    def check_backward(self, module: nn.Module, results: list[DTensor], leaf: Tensor) -> None:
        """Try the way back to what the module got.

        Raises:
            Conflict: It fails.
        """
        results = [each for each in results if each.requires_grad]
        if not results:
            return
        self._backwards = True
        try:
            leaves = [leaf, *(each for each in module.parameters() if each.requires_grad)]
            capture(results, [torch.ones_like(each) for each in results], [*map(get_gradient_edge, leaves)])
        except FATAL:
            raise
        except Exception as error:
            raise Conflict(f"gradients of shards fail: {error!r}"[:300]) from error
        finally:
            self._backwards = False
