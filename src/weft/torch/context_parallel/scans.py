"""Scans of state-space models and linear attention: each rank computes whole sequences of its own channels.

Models write a scan as a function of their own, or call a kernel: nobody can see from one of its operations what the
whole is. But each channel, or head, is computed by itself. So an all-to-all gives channels for positions, the function
computes as ever, and another all-to-all gives positions back, as for attention (``all_to_all``).

The functions are known by the name and the arguments that the files of `transformers` share. What stands for one in
such a file passes on all calls without sharded sequences.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.torch.tensor_parallel.functions import answered
from weft.torch.tensor_parallel.rules import Rule, Unsplittable, shard_of, shards_in
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensor_parallel.sharded_activations import AllGathered
from weft.torch.tensors.shards import ShardPositions

from .all_to_all import heads_for_positions, positions_for_heads
from .exchange import sharded, share
from .neighbours import with_neighbours
from .weights import used


@dataclass(frozen=True)
class Scan:
    """The dims of a scan's arguments and results, a letter each.

    ``b`` samples, ``t`` positions, ``c`` channels or heads, ``g`` groups of those, ``.`` another one.
    """

    arguments: Mapping[str, str]
    results: tuple[str, ...]


_DELTA_RULE = Scan(
    dict(query="btg.", key="btg.", value="btc.", g="btc", beta="btc", initial_state="bc.."), ("btc.", "bc..")
)
SCANS = {
    "mamba_selective_scan": Scan(
        dict(hidden_states="bct", dt="bct", A="c.", B="b.t", C="b.t", D="c", z="bct", delta_bias="c"),
        ("bct", "bc."),
    ),
    "mamba2_chunk_scan": Scan(
        dict(
            hidden_states="btc.",
            dt="btc",
            A="c",
            B="btg.",
            C="btg.",
            D="c",
            dt_bias="c",
            initial_states="bc..",
        ),
        ("btc.", "bc.."),
    ),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "rwkv_linear_attention": Scan(dict(time_decay="c", time_first="c", key="btc", value="btc"), ("btc",)),
}
CONVOLUTION = "causal_conv1d_fn"
FUSED = "mamba_inner_fn", "mamba2_split_conv1d_scan_combined"
"""A layer in one kernel, which may give None: then the layer calls the scan."""
KNOWN: dict[Any, Rule] = {}
"""The rules of what stands for functions in the files of models."""


def know_scans(modules: Iterable[nn.Module]) -> None:
    """From now on scans in the files of these modules take sharded sequences."""
    for namespace in {type(each).__module__: None for root in modules for each in root.modules()}:
        names = vars(sys.modules[namespace]) if namespace in sys.modules else {}
        for name in (*SCANS, CONVOLUTION, *FUSED):
            function = names.get(name)
            if inspect.isfunction(function) and not hasattr(function, "_weft_stands_for"):
                rule = _rule(name, function)
                if rule is not None:
                    names[name] = _standing_for(function)
                    KNOWN[names[name]] = rule


def _rule(name: str, function: Callable[..., Any]) -> Rule | None:
    """The function's rule; None if it has other arguments than those that are known."""
    parameters = [*inspect.signature(function).parameters]
    if name in FUSED:
        return _not_at_once
    if name == CONVOLUTION:
        return causal_convolution if parameters[:3] == ["hidden_states", "weight", "bias"] else None
    scan = SCANS[name]
    return functools.partial(by_channels, scan, parameters) if {*scan.arguments} <= {*parameters} else None


def _standing_for(function: Any) -> Any:
    @functools.wraps(function)
    def scan(*args: Any, **kwargs: Any) -> Any:
        return answered(scan, args, kwargs) if shards_in(args, kwargs) else function(*args, **kwargs)

    scan._weft_stands_for = function  # type: ignore[attr-defined]
    return scan


def _not_at_once(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    return None


def causal_convolution(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution over a position and those before it, (samples, channels, positions), perhaps by a kernel."""
    given = {**dict(zip(("hidden_states", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = (given.pop(name, None) for name in ("hidden_states", "weight", "bias"))
    if shard_of(x) != 2 or any(isinstance(each, Tensor) for each in given.values()) or len(args) > 3:
        raise Unsplittable("takes whole sequences")
    lost, total = weight.shape[-1] - 1, x.shape[2]
    weight, bias = used(weight, shard_group), None if bias is None else used(bias, shard_group)
    blocks = with_neighbours(x.to_local(), 2, total, lost, 0, shard_group)
    found = [func(block, weight, bias, **given)[..., lost:] for block in blocks]
    return sharded(torch.cat(found, 2), 2, total, shard_group)


def by_channels(
    scan: Scan, parameters: list[str], shard_group: ShardGroup, func: Any, args: Any, kwargs: Any
) -> Any:
    """A scan, each rank computing its own channels."""
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in given.items() if name not in tensors}
    if tensors.keys() - scan.arguments or shards_in((), rest):
        raise Unsplittable("has an argument that is not known")
    channels = Channels(scan, tensors, shard_group)
    own = {name: channels.own(value, scan.arguments[name]) for name, value in tensors.items()}
    own.update(channels.exchanged())
    result = func(**{name: own.get(name, value) for name, value in given.items()})
    if isinstance(result, Tensor):
        return channels.positions(result, scan.results[0])
    first, *others = result
    return channels.positions(first, scan.results[0]), *(
        channels.whole(each) if isinstance(each, Tensor) else each for each in others
    )


class Channels:
    """This rank's channels of a scan's arguments."""

    def __init__(self, scan: Scan, tensors: Mapping[str, Tensor], shard_group: ShardGroup) -> None:
        self.scan, self.tensors, self.shard_group = scan, tensors, shard_group
        long = {name: dims for name, dims in scan.arguments.items() if "t" in dims and name in tensors}
        for name, dims in long.items():
            if isinstance(tensors[name], DTensor) and shard_of(tensors[name]) != dims.index("t"):
                raise Unsplittable("is cut along another dim than positions")
        self.total = {tensors[name].shape[dims.index("t")] for name, dims in long.items()}.pop()
        self.count = next(tensors[name].shape[dims.index("c")] for name, dims in long.items() if "c" in dims)
        if self.count % shard_group.size:
            raise Unsplittable(f"has {self.count} channels, which cannot be divided by {shard_group.size}")
        self.own_count = self.count // shard_group.size
        self.most = shard_group.positions(self.total).sizes[0]

    def own(self, tensor: Tensor, dims: str) -> Tensor:
        """This rank's channels of an argument; where they come in an exchange, the argument itself."""
        dim = max(dims.find("c"), dims.find("g"))
        if isinstance(tensor, DTensor):
            if "t" not in dims:
                raise Unsplittable("has a sharded argument without positions")
            if dim >= 0 and tensor.shape[dim] % self.shard_group.size == 0:
                return tensor
            tensor = share(tensor, self.shard_group)
        else:
            tensor = used(tensor, self.shard_group)
        return tensor if dim < 0 else tensor.narrow(dim, *self._channels(tensor.shape[dim]))

    def _channels(self, groups: int) -> tuple[int, int]:
        """The first of so many groups that this rank's channels are in, and how many these are."""
        width = self.count // groups
        if self.count % groups or (self.own_count % width and width % self.own_count):
            raise Unsplittable(f"has {groups} groups for {self.own_count} channels of each rank")
        return self.shard_group.rank * self.own_count // width, max(1, self.own_count // width)

    def exchanged(self) -> dict[str, Tensor]:
        """This rank's channels at all positions, of the arguments that are sharded along positions."""
        found, kinds = {}, dict[torch.dtype, list[str]]()
        for name, tensor in self.tensors.items():
            dims = self.scan.arguments[name]
            dim = max(dims.find("c"), dims.find("g"))
            if isinstance(tensor, DTensor) and dim >= 0 and tensor.shape[dim] % self.shard_group.size == 0:
                kinds.setdefault(tensor.dtype, []).append(name)
        for names in kinds.values():
            sent = [
                _filled(_turned(self.tensors[name].to_local(), self.scan.arguments[name]), self.most)  # type: ignore[attr-defined]
                for name in names
            ]
            for name, full in zip(names, heads_for_positions(sent, self.shard_group), strict=True):
                found[name] = _turned_back(full.narrow(-2, 0, self.total), self.scan.arguments[name])
        return found

    def positions(self, result: Tensor, dims: str) -> DTensor:
        """This rank's positions of a result."""
        sizes = self.shard_group.positions(self.total).sizes
        full = _filled(_turned(result, dims), self.most * self.shard_group.size)
        local = positions_for_heads(full, self.shard_group).narrow(-2, 0, sizes[self.shard_group.rank])
        return sharded(_turned_back(local, dims).contiguous(), dims.index("t"), self.total, self.shard_group)

    def whole(self, state: Tensor) -> Tensor:
        """A state of all channels, (samples, channels, ...), which every rank gets."""
        sizes = ShardPositions.contiguous([self.own_count] * self.shard_group.size)
        full: Tensor = AllGathered.apply(state, self.shard_group, 1, sizes)
        return full


def _turned(tensor: Tensor, dims: str) -> Tensor:
    """The tensor as (..., channels, positions, one more)."""
    tensor = tensor if dims.endswith(".") else tensor.unsqueeze(-1)
    return tensor.movedim((max(dims.find("c"), dims.find("g")), dims.index("t")), (-3, -2))


def _turned_back(tensor: Tensor, dims: str) -> Tensor:
    tensor = tensor.movedim((-3, -2), (max(dims.find("c"), dims.find("g")), dims.index("t")))
    return tensor if dims.endswith(".") else tensor.squeeze(-1)


def _filled(tensor: Tensor, count: int) -> Tensor:
    """As many positions, zeros behind those that there are."""
    missing = count - tensor.shape[-2]
    return tensor if not missing else nn.functional.pad(tensor, (0, 0, 0, missing))
