"""One attempt at running a sharded model, and what it shows: see ``find``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from weft.torch.pytorch.private import TorchDispatchMode, arguments_of, capture
from weft.torch.pytorch.torch_functions import LIKE
from weft.torch.tensors.marks import BLOCKS, TAGS
from weft.torch.tensors.pytree import tensors_in

from .functions import FATAL, Functions, name_of
from .rules import VIEWS, Unsplittable, new_shape, ranges_of, shard_of, shards_in, wrap
from .shard_group import ShardGroup
from .splits import COLUMN, ROW, features, is_transposed, pattern

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional")
_REACHES_NONE = "no linear takes its results sharded"
UNCALLED = "the run did not call it"


class Collectives(TorchDispatchMode):
    """Counts the messages between ranks that operations would need, and full tensors that they write parts into."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            given = [*zip(arguments_of(func), args, strict=False)]
            given += [(each, (kwargs or {}).get(each.name)) for each in arguments_of(func)[len(args) :]]
            for argument, value in given:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                self.count += writes and isinstance(value, Tensor) and not isinstance(value, DTensor)
            return NotImplemented
        if func.namespace in _COLLECTIVES and "wait" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))


class Stop(BaseException):
    """Ends a run at the first conflict: what comes after it would look different in the next run."""


class Trial:
    """The linears that are tried and what has come of it.

    Attributes:
        whole: Linears that stay whole, and why.
        kinds: The others that the last run called, and as what.
        fed: For linears cut by their inputs, the linears where these come from.
        called: Modules that were called, by their ids.
        wanted: Linears that the script wants to be cut, and as what. They never stay whole.
        alone: Those of them that are cut without another one: full tensors go in and come out.
        changed: Whether the last run has changed what is tried.
    """

    def __init__(
        self, candidates: Mapping[str, nn.Module], size: int, wanted: Mapping[str, str] | None = None
    ) -> None:
        self.candidates, self.size, self.wanted = candidates, size, wanted or {}
        self.whole: dict[str, str] = {}
        self.alone: set[str] = set()
        self.called: set[int] = set()
        self._alike: dict[str, list[str]] = {}
        for name in candidates:
            self._alike.setdefault(pattern(name), []).append(name)
        self._edges: dict[str, set[int]] = {}
        self._heads: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Before each run."""
        self.kinds: dict[str, str] = {}
        self.fed: dict[str, set[str]] = {}
        self.changed, self._last = False, ""
        self._given: dict[str, Any] = {}

    def exclude(self, name: str, reason: str) -> None:
        """Keep a linear whole, and those like it; one that the script wants to be cut is cut alone."""
        if name in self.wanted:
            self.changed |= name not in self.alone
            self.alone.add(name)
            return
        for each in self._alike[pattern(name)]:
            if each not in self.whole and each not in self.wanted:
                self.whole[each] = reason
                self.changed = True

    def conflict(self, names: frozenset[str], reason: str) -> None:
        """Notes that results of these linears cannot be sharded; a fused projection gets another chance.

        The linear that was called first is to blame, and those that took the same tensor. If the others are, too, the
        next run shows.

        Raises:
            Stop: Always.
        """
        order = list(self._given)
        first = min(names, key=order.index)
        blamed = [name for name in names if self._given[name] is self._given[first]]
        for key in map(pattern, blamed):
            if key in self._heads and key not in self._edges:
                width, count = features(self.candidates[self._alike[key][0]])[1], self._heads.pop(key)
                self._edges[key] = {width * n // count for n in range(1, count)}
                self.changed = True
                raise Stop
        for name in blamed:
            self.exclude(name, reason)
        raise Stop

    def blame(self, error: Exception) -> bool:
        """The model itself failed: blame the linear that was called last. False if there was none."""
        if not self._last or self._last in self.whole or self._last in self.alone:
            return False
        self.exclude(self._last, f"with its results sharded the model fails: {error!r}"[:300])
        return True

    def end(self) -> None:
        """A run came to its end: linears whose sharded results led nowhere stay whole."""
        if self.changed:
            return
        used = set().union(*self.fed.values()) if self.fed else set()
        for name, kind in list(self.kinds.items()):
            if kind == COLUMN and name not in used:
                self.exclude(name, _REACHES_NONE)
        for name in self.candidates:
            if name not in self.kinds and name in self.wanted:
                self.alone.add(name)
            elif name not in self.kinds and name not in self.whole:
                self.whole[name] = UNCALLED

    def blocks_of(self, name: str) -> tuple[int, ...]:
        """The number of results in each block of a linear."""
        edges = sorted({0, features(self.candidates[name])[1], *self._edges.get(pattern(name), ())})
        return tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False))

    def follow(self, name: str, other: str) -> None:
        """The results of a linear that was not called have the blocks of those of another one."""
        if pattern(other) in self._edges:
            self._edges[pattern(name)] = self._edges[pattern(other)]

    def note_edges(self, name: str, ranges: list[tuple[int, int]]) -> None:
        """Pieces were taken of the linear's results: it is a fused projection."""
        width = features(self.candidates[name])[1]
        edges = {edge for one in ranges for edge in one if 0 < edge < width}
        known = self._edges.setdefault(pattern(name), set())
        if not edges <= known:
            known |= edges
            self.changed = True

    def note_heads(self, name: str, count: int) -> None:
        """The results were seen as ``count`` times something that could be sharded as well."""
        self._heads.setdefault(pattern(name), count)

    def known_fused(self, name: str) -> bool:
        return pattern(name) in self._edges

    @contextmanager
    def attached(self, watcher: Watcher) -> Iterator[None]:
        """Inside, linears that are not whole run on shards."""
        settled = self.alone.union(self.whole)
        tried = [(name, module) for name, module in self.candidates.items() if name not in settled]
        for name, module in tried:
            module.__dict__["forward"] = _Call(name, module, watcher)
        try:
            yield
        finally:
            for _, module in tried:
                module.__dict__.pop("forward", None)

    def take_part(self, name: str, kind: str, given: Any) -> bool:
        """True if the linear can be called as such a one."""
        self._last = name
        if name in self.whole or name in self.alone:
            return False
        self._given.setdefault(name, given)
        if self.kinds.setdefault(name, kind) != kind:
            self.exclude(name, "it takes full tensors in one call and parts in another")
            raise Stop
        inputs, results = features(self.candidates[name])
        count, what = (results, "results") if kind == COLUMN else (inputs, "inputs")
        for block in self.blocks_of(name) if kind == COLUMN else (inputs,):
            if block % self.size:
                shown = f"{count} {what}" if block == count else f"block of {block} {what}"
                self.exclude(name, f"its {shown} cannot be divided by {self.size}")
                return False
        return True


class _Call:
    """Stands for a linear's forward during a trial."""

    def __init__(self, name: str, module: nn.Module, watcher: Watcher) -> None:
        self.name, self.module, self.watcher = name, module, watcher

    def __call__(self, input: Any) -> Any:
        trial, shard_group = self.watcher.trial, self.watcher.shard_group
        module: Any = self.module
        weight = module.weight.t() if is_transposed(module) else module.weight
        wanted = trial.wanted.get(self.name)
        if isinstance(input, DTensor):
            if wanted == COLUMN:
                self.watcher.note([input], f"gives parts to {self.name}, which is to be column-parallel")
            if shard_of(input) != input.ndim - 1 or getattr(input, BLOCKS) is not None:
                self.watcher.note([input], "gives a linear parts of another dimension than its inputs")
            if not trial.take_part(self.name, ROW, input):
                self.watcher.note([input], f"gives parts to {self.name}, which stays whole")
            trial.fed.setdefault(self.name, set()).update(getattr(input, TAGS) or ())
            self.watcher.check_backward(input)
            local = input.to_local().detach()
            return nn.functional.linear(local, weight[:, : local.shape[-1]], module.bias)
        if not trial.take_part(self.name, wanted or COLUMN, input) or wanted == ROW:
            return nn.functional.linear(input, weight, module.bias)
        own = weight.shape[0] // shard_group.size
        bias = None if module.bias is None else module.bias[:own]
        result = self.watcher.source(nn.functional.linear(input, weight[:own], bias), self.name)
        return result


class Watcher(Functions):
    """Watches functions on sharded tensors during a trial."""

    def __init__(self, shard_group: ShardGroup, trial: Trial) -> None:
        super().__init__(shard_group)
        self.trial, self.collectives = trial, Collectives()
        self.fresh: dict[int, tuple[DTensor, str]] = {}
        self._backwards = False

    def source(self, local: Tensor, name: str) -> DTensor:
        """The result of a linear, this rank's part of which is ``local``."""
        leaf = local.detach().requires_grad_()
        result = wrap(leaf.view_as(leaf), -1, self.shard_group, self.trial.blocks_of(name))
        setattr(result, TAGS, frozenset([name]))
        self.fresh[id(result)] = (result, name)
        return result

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        parts = shards_in(args, kwargs)
        self._look_at_fresh(func, args, kwargs)
        before = self.collectives.count
        try:
            result = self.on_shards(func, types, args, kwargs)
        except FATAL:
            raise
        except Exception as reason:
            return self.on_full_tensors(func, args, kwargs, reason)
        lost = self.collectives.count > before
        made = [each for each in tensors_in(result) if isinstance(each, DTensor)]
        for each in made:
            placement = each.placements[0]
            lost |= placement.is_partial()
            lost |= (
                placement.is_replicate() and func not in LIKE and any(shard_of(p) is not None for p in parts)
            )
        if lost:
            return self.on_full_tensors(func, args, kwargs, Unsplittable(""))
        tags = frozenset().union(*(getattr(part, TAGS) or () for part in parts))
        for each in made:
            setattr(each, TAGS, tags)
        return result

    def on_full_tensors(self, func: Any, args: Any, kwargs: Any, reason: BaseException) -> Any:
        parts, text = shards_in(args, kwargs), f"{name_of(func)} takes the whole"
        if isinstance(reason, Unsplittable) and str(reason):
            text = f"{name_of(func)} {reason}"
            parts = [reason.tensor] if isinstance(reason.tensor, DTensor) else parts
        shape = new_shape(func, args, kwargs) if func in VIEWS else None
        if shape is not None:
            text = _cannot_see(parts[0], shape, self.shard_group.size) or text
        self.note(parts, text)

    def note(self, parts: list[DTensor], reason: str) -> None:
        """Tensors cannot be sharded.

        Raises:
            Stop: Always.
        """
        self.trial.conflict(frozenset().union(*(getattr(part, TAGS) or () for part in parts)), reason)

    def finish(self, result: Any) -> None:
        """The run is over."""
        used = set().union(*self.trial.fed.values()) if self.trial.fed else set()
        for each in tensors_in(result):
            if isinstance(each, DTensor) and not (getattr(each, TAGS) or frozenset()) <= used:
                self.note([each], "its results leave the model")
        self.trial.end()

    def check_backward(self, tensor: DTensor) -> None:
        """Try the way back to the linears where a tensor comes from; checkpoints on it run once more meanwhile."""
        tags: frozenset[str] = getattr(tensor, TAGS) or frozenset()
        sources = [fresh for fresh, name in self.fresh.values() if name in tags]
        if self._backwards or not tensor.requires_grad:
            return
        before, self._backwards = self.collectives.count, True
        edges = [
            GradientEdge(fresh.grad_fn, fresh.output_nr) for fresh in sources if fresh.grad_fn is not None
        ]
        try:
            capture([tensor], [torch.ones_like(tensor)], edges)
        except FATAL:
            raise
        except Exception as error:
            self.note([tensor], f"gradients of shards fail: {error!r}"[:300])
        finally:
            self._backwards = False
        if self.collectives.count > before:
            self.note([tensor], "gradients take the whole")

    def _look_at_fresh(self, func: Any, args: Any, kwargs: Any) -> None:
        """Find out from what is done with a linear's results whether they are several behind each other."""
        given = args[0] if args else None
        found = self.fresh.get(id(given))
        if found is None or found[0] is not given:
            return
        pieces = ranges_of(func, args, kwargs)
        if pieces is not None and len({edge for one in pieces[0] for edge in one}) > 2 - (not pieces[1]):
            self.trial.note_edges(found[1], pieces[0])
            setattr(given, BLOCKS, self.trial.blocks_of(found[1]))
        elif func in VIEWS and not self.trial.known_fused(found[1]):
            shape = new_shape(func, args, kwargs)
            for at, count in enumerate(shape[:-1] if shape else ()):
                assert shape is not None
                rest = torch.Size(shape[at:]).numel()
                if rest == given.shape[-1] and 1 < count and shape[at + 1] % self.shard_group.size == 0:
                    self.trial.note_heads(found[1], count)


def _cannot_see(part: DTensor, shape: tuple[int, ...], size: int) -> str:
    """Why a view of a sharded tensor cannot be sharded."""
    dim = shard_of(part)
    if dim is None or dim != part.ndim - 1:
        return ""
    for at, count in enumerate(shape[:-1]):
        if torch.Size(shape[at:]).numel() == part.shape[-1] and count % size:
            seen = " x ".join(map(str, shape[at:]))
            few = [*dict.fromkeys(n for n in shape[at : at + 2] if n % size and at < len(shape) - 2)] or [
                count
            ]
            text = f"neither {few[0]} nor {few[1]} can" if len(few) == 2 else f"{few[0]} cannot"
            return f"its results are {seen}, and {text} be divided by {size}"
    return ""
