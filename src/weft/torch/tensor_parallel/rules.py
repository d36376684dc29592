"""weft's own rules for functions on sharded tensors: attention, products, dropout, fused projections.

Each takes the group, the function and its arguments. It gives the result, or ``NotImplemented`` where PyTorch's own
rule will do, or raises :class:`Unsplittable` where full tensors are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.torch.pytorch.torch_functions import named
from weft.torch.session.random_streams import TORCH, Streams, mix
from weft.torch.tensors.marks import BLOCKS

from .cuts import Cut, joined
from .pieces import check_pieces
from .shard_group import ShardGroup, enter, exchanging


class Unsplittable(Exception):
    """A function needs full tensors; the text says why, behind the function's name, and ``tensor`` which one."""

    def __init__(self, text: str, tensor: Any = None) -> None:
        super().__init__(text)
        self.tensor = tensor


def shards_in(args: Any, kwargs: Any) -> list[DTensor]:
    """The sharded tensors among the arguments."""
    found: list[DTensor] = []
    waiting = [*args, *kwargs.values()]
    for each in waiting:
        if isinstance(each, DTensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
    return found


def shard_of(tensor: Any) -> int | None:
    """The dimension along which a tensor is sharded; None if it is whole, or in no simple parts."""
    if not isinstance(tensor, DTensor):
        return None
    placement = tensor.placements[0]
    return placement.dim if type(placement) is Shard else None


def as_full_tensor(tensor: Tensor) -> Tensor:
    """A plain tensor with what the parts hold together; its gradient reaches all parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    check_pieces(tensor)
    blocks = getattr(tensor, BLOCKS)
    with exchanging(tensor):
        full: Tensor = tensor.full_tensor()
    if blocks is None:
        return full
    size = tensor.device_mesh.size()
    dim = full.ndim - 1
    return joined(full.chunk(size, dim), Cut(dim, blocks, tuple(full.shape)))


def as_shard(tensor: DTensor, dim: int, shard_group: ShardGroup) -> Tensor:
    """This rank's part along ``dim`` of a tensor in other parts."""
    check_pieces(tensor)
    if getattr(tensor, BLOCKS) is not None:
        full = as_full_tensor(tensor)
        return (
            DTensor.from_local(full, shard_group.mesh, [Replicate()])
            .redistribute(placements=[Shard(dim)])
            .to_local()
        )
    if shard_of(tensor) != dim:
        with shard_group.record():
            tensor = tensor.redistribute(placements=[Shard(dim)])
    local: Tensor = tensor.to_local()
    return local


def wrap(local: Tensor, dim: int, shard_group: ShardGroup, blocks: tuple[int, ...] | None = None) -> DTensor:
    """The ranks' tensors as one, behind each other along ``dim``."""
    tensor = DTensor.from_local(local, shard_group.mesh, [Shard(dim % local.ndim)], run_check=False)
    if blocks is not None and len(blocks) > 1:
        setattr(tensor, BLOCKS, blocks)
    return tensor


# --- operands ----------------------------------------------------------------------------------------------


def _operand(tensor: Tensor, back: int, total: int, shard_group: ShardGroup) -> Tensor:
    """This rank's part of an operand, of which dimension ``-back`` is sharded elsewhere and has ``total`` there."""
    if isinstance(tensor, DTensor):
        if getattr(tensor, BLOCKS) is None and shard_of(tensor) == tensor.ndim - back:
            local: Tensor = tensor.to_local()
            return local
        raise Unsplittable("has an operand in other parts", tensor)
    if tensor.ndim < back or tensor.shape[-back] == 1:
        return enter(tensor, shard_group)
    if tensor.shape[-back] == total:
        return enter(tensor, shard_group).narrow(
            -back, shard_group.rank * (total // shard_group.size), total // shard_group.size
        )
    raise Unsplittable(f"has an operand of {tensor.shape[-back]} where {total} are sharded")


def attention(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Scaled dot-product attention on this rank's heads."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
    given.update(kwargs)
    query, key, value, mask = (
        given.pop("query"),
        given.pop("key"),
        given.pop("value"),
        given.pop("attn_mask", None),
    )
    backs = {each.ndim - dim for each in (query, key, value) if (dim := shard_of(each)) is not None}
    back = max(backs, default=0)
    if back < 3 or query.ndim < back or query.shape[-back] % shard_group.size:
        raise Unsplittable("needs whole heads on each rank")
    total = query.shape[-back]
    local = _operand(query, back, total, shard_group)
    key, value = (_few_heads(each, back, total, shard_group) for each in (key, value))
    if mask is not None:
        mask = _operand(mask, back, total, shard_group)
    with stream_of_part(shard_group, given.get("dropout_p", 0.0) > 0):
        result = func(local, key, value, mask, **given)
    return wrap(result, result.ndim - back, shard_group)


def _few_heads(tensor: Tensor, back: int, total: int, shard_group: ShardGroup) -> Tensor:
    """This rank's part of keys or values, which may have fewer heads than there are ranks."""
    if isinstance(tensor, DTensor) and (shard_of(tensor) or 0) >= tensor.ndim - 2:
        raise Unsplittable(
            f"has {tensor.shape[-back]} heads of keys, which cannot be divided by {shard_group.size}", tensor
        )
    if isinstance(tensor, DTensor) or tensor.ndim < back or tensor.shape[-back] in (1, total):
        return _operand(tensor, back, total, shard_group)
    heads, own = tensor.shape[-back], total // shard_group.size
    group = total // heads
    if total % heads or (group % own and own % group):
        raise Unsplittable(f"has {heads} heads of keys for {own} heads of queries on each rank")
    first, count = shard_group.rank * own // group, max(1, own // group)
    return enter(tensor, shard_group).narrow(-back, first, count)


def product(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A product of matrices in batches that are sharded."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    for each in args:
        dim = shard_of(each)
        if dim is not None and dim < each.ndim - 2:
            back, total = each.ndim - dim, each.shape[dim]
            break
    else:
        return NotImplemented
    result = func(*(_operand(each, back, total, shard_group) for each in args))
    return wrap(result, result.ndim - back, shard_group)


def batched_product(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A product of matrices whose first dimension, heads of all samples, is sharded."""
    if kwargs.keys() - {"batch1", "batch2", "beta", "alpha"}:
        return NotImplemented
    operands = [*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs)]
    found = [each for each in operands if isinstance(each, DTensor) and each.placements[0].is_shard(0)]
    found += [each for each in operands if isinstance(each, DTensor) and _is_strided(each)]
    if not found or any(each.shape[0] != found[0].shape[0] for each in operands):
        return NotImplemented
    placements = found[-1].placements
    local = []
    for each in operands:
        if not isinstance(each, DTensor):
            each = DTensor.from_local(each, shard_group.mesh, [Replicate()], run_check=False).redistribute(
                placements=placements
            )
        if each.placements != placements:
            raise Unsplittable("has operands in different parts")
        local.append(each.to_local())
    numbers = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
    return DTensor.from_local(func(*local, **numbers), shard_group.mesh, placements, run_check=False)


def _is_strided(tensor: DTensor) -> bool:
    """True if sharded heads were seen as one dimension with the samples."""
    placement: Any = tensor.placements[0]
    return hasattr(placement, "split_factor") and placement.dim == 0


def concatenated(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch lets empty tensors of one dimension be joined with any others; its rules for parts do not."""
    if not args or not isinstance(args[0], (list, tuple)):
        return NotImplemented
    filled = [each for each in args[0] if isinstance(each, DTensor) or each.shape != (0,)]
    return NotImplemented if len(filled) == len(args[0]) else func(filled, *args[1:], **kwargs)


def made_new(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor with as many heads as a sharded one: it is sharded, too, for it is about to be filled with them."""
    tensor = args[0]
    dim, size = (
        shard_of(tensor),
        args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:],
    )
    if dim is None or len(size) != tensor.ndim or size[dim] != tensor.shape[dim]:
        return NotImplemented
    local = tensor.to_local()
    return wrap(func(local, [*size[:dim], local.shape[dim], *size[dim + 1 :]], **kwargs), dim, shard_group)


# --- random numbers ----------------------------------------------------------------------------------------


def streams_of(shard_group: ShardGroup) -> Streams:
    """The random numbers of where the group's tensors are."""
    device = torch.device(shard_group.mesh.device_type)
    return Streams(torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)


class stream_of_part:
    """Inside, random numbers are this rank's own; all ranks' common stream moves on by one number."""

    def __init__(self, shard_group: ShardGroup, draws: bool = True) -> None:
        self._group, self._draws = shard_group, draws

    def __enter__(self) -> None:
        if self._draws:
            self._streams = streams_of(self._group)
            seed = self._streams.draw()
            self._before = self._streams.capture(TORCH)
            self._streams.seed(mix(seed, self._group.seat), TORCH)

    def __exit__(self, *_: object) -> None:
        if self._draws:
            self._streams.restore(self._before)


def dropout(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout and the like, whose result has its first argument's shape: each part with numbers of its own.

    A generator of the script's own is the same on all ranks, so it draws for the whole.
    """
    given = args[0] if args else kwargs.get("input")
    dim = shard_of(given)
    rest = [*args[1:], *(value for name, value in kwargs.items() if name != "input")]
    if dim is None or any(isinstance(each, (Tensor, torch.Generator)) for each in rest):
        return (
            NotImplemented if isinstance(given, DTensor) and given.placements[0].is_replicate() else _fail()
        )
    assert given is not None
    local = given.to_local()
    with stream_of_part(shard_group, draws(func, args, kwargs)):
        result = func(local, *args[1:], **kwargs) if args else func(**{**kwargs, "input": local})
    return given if result is local else wrap(result, dim, shard_group)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a function of random numbers draws any: dropout does so only in training."""
    if "dropout" not in getattr(func, "__name__", ""):
        return True
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return given.get("p", 0.5) > 0 and bool(given.get("training", given.get("train", True)))


def _fail() -> Any:
    raise Unsplittable("draws random numbers for a sharded tensor")


def statistics(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that write running statistics, which are whole."""
    raise Unsplittable("keeps statistics of the whole")


def drawn(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Other functions that draw random numbers, or may: as in one process, for full tensors.

    PyTorch's own for parts draw the same numbers on every rank.
    """
    return _fail()


def over_sequences(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions made of others, dropout among them, which no rule for one of these sees."""
    raise Unsplittable("takes whole sequences")


# --- fused projections -------------------------------------------------------------------------------------

_SPLIT = named((torch, Tensor), ("split", "split_with_sizes"))
_CHUNK = named((torch, Tensor), ("chunk",))
_NARROW = named((torch, Tensor), ("narrow",))
_GETITEM = {Tensor.__getitem__}
VIEWS = named((torch, Tensor), ("view", "reshape", "unflatten"))
_ONE_BY_ONE = named(
    (torch, Tensor, F),
    ("to", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "type_as", "clamp", "gelu", "silu",
     "relu", "tanh", "sigmoid", "mul", "__mul__", "__rmul__", "__truediv__", "div"),
)  # fmt: skip


def ranges_of(func: Any, args: Any, kwargs: Any) -> tuple[list[tuple[int, int]], bool] | None:
    """From where to where a function takes pieces of its argument's last dimension, and whether it gives several.

    ``None``: it does something else.
    """
    tensor = args[0] if args else None
    if not isinstance(tensor, DTensor):
        return None
    last, width = tensor.ndim - 1, tensor.shape[-1]
    if func in _SPLIT or func in _CHUNK:
        how = (
            args[1]
            if len(args) > 1
            else next((v for k, v in kwargs.items() if k not in ("dim", "input")), None)
        )
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        if how is None or dim % tensor.ndim != last:
            return None
        if func in _CHUNK:
            how = math.ceil(width / how)
        sizes = (
            [how] * (width // how) + [width % how] * bool(width % how) if isinstance(how, int) else list(how)
        )
        stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        return list(zip([0, *stops[:-1]], stops, strict=True)), True
    if func in _NARROW and not kwargs and args[1] % tensor.ndim == last and isinstance(args[2], int):
        return [(args[2], args[2] + args[3])], False
    if func in _GETITEM:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        full = [
            each is Ellipsis or each == slice(None) for each in index[:-1] if not isinstance(each, Tensor)
        ]
        reaches = len(index) == tensor.ndim or (len(index) > 1 and index[0] is Ellipsis)
        if reaches and len(full) == len(index) - 1 and all(full) and isinstance(index[-1], slice):
            start, stop, step = index[-1].indices(width)
            if step == 1:
                return [(start, max(start, stop))], False
    return None


def blocks_apart(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions on the result of a fused projection: those that take its blocks apart, and some one by one."""
    tensor = args[0] if args else None
    blocks = getattr(tensor, BLOCKS, None)
    if blocks is None or len(shards_in(args[1:], kwargs)):
        raise Unsplittable("takes the result of a fused projection together with other parts")
    assert isinstance(tensor, DTensor)
    if func in _ONE_BY_ONE and all(not isinstance(each, Tensor) or each.numel() == 1 for each in args[1:]):
        return wrap(func(tensor.to_local(), *args[1:], **kwargs), -1, shard_group, blocks)
    pieces = ranges_of(func, args, kwargs)
    if pieces is not None:
        return _pieces(tensor, blocks, *pieces, shard_group)
    if func in VIEWS:
        return _seen_as(tensor, blocks, func, args, kwargs, shard_group)
    raise Unsplittable("takes the result of a fused projection as it is")


def _pieces(
    tensor: DTensor,
    blocks: tuple[int, ...],
    ranges: list[tuple[int, int]],
    several: bool,
    shard_group: ShardGroup,
) -> Any:
    edges = [sum(blocks[:n]) for n in range(len(blocks) + 1)]
    if any(edge not in edges for one in ranges for edge in one):
        raise Unsplittable("takes pieces of a fused projection that are not its blocks")
    local = tensor.to_local()
    found = []
    for start, stop in ranges:
        own = blocks[edges.index(start) : edges.index(stop)]
        piece = local.narrow(-1, start // shard_group.size, (stop - start) // shard_group.size)
        found.append(wrap(piece, -1, shard_group, own))
    return tuple(found) if several else found[0]


def new_shape(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """The shape as which a function of :data:`VIEWS` sees its argument."""
    tensor = args[0]
    if kwargs and func not in named((torch, Tensor), ("unflatten",)):
        return None
    if func in named((torch, Tensor), ("unflatten",)):
        dim = (args[1] if len(args) > 1 else kwargs["dim"]) % tensor.ndim
        sizes = args[2] if len(args) > 2 else kwargs["sizes"]
        shape = [*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]]
    else:
        shape = [*args[1]] if isinstance(args[1], (tuple, list)) else [*args[1:]]
    if not all(isinstance(size, int) for size in shape):
        return None
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = tensor.numel() // rest if rest else 0
    return tuple(shape)


def _seen_as(
    tensor: DTensor, blocks: tuple[int, ...], func: Any, args: Any, kwargs: Any, shard_group: ShardGroup
) -> DTensor:
    """The result of a fused projection seen as ``(..., blocks, heads, size of a head)``."""
    shape, count, width = new_shape(func, args, kwargs), len(blocks), tensor.shape[-1]
    if shape is not None:
        if shape == tuple(tensor.shape):
            return tensor
        for at in range(len(shape) - 1):
            fits = (
                shape[at] == count
                and math.prod(shape[at:]) == width
                and shape[at + 1] % shard_group.size == 0
            )
            if fits and len(set(blocks)) == 1:
                own = (*shape[: at + 1], shape[at + 1] // shard_group.size, *shape[at + 2 :])
                return wrap(tensor.to_local().reshape(own), at + 1, shard_group)
    raise Unsplittable("sees the result of a fused projection in another shape than its blocks'")


Rule = Callable[[ShardGroup, Any, Any, Any], Any]
RULES: dict[Any, Rule] = {
    "blocks": blocks_apart,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(named((torch,), ("cat", "concat", "concatenate")), concatenated),
    **dict.fromkeys(named((torch, Tensor), ("matmul", "__matmul__")), product),
    **dict.fromkeys(named((torch, Tensor), ("bmm", "baddbmm")), batched_product),
    **dict.fromkeys(named((Tensor,), ("new_empty", "new_zeros", "new_ones")), made_new),
    **dict.fromkeys(named((torch, F), ("batch_norm", "instance_norm")), statistics),
    **dict.fromkeys(
        named((torch, Tensor, F), ("dropout", "dropout_", "bernoulli", "bernoulli_", "rand_like", "randn_like")),
        dropout,
    ),
    **dict.fromkeys(
        named(
            (torch, Tensor, F),
            ("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_", "feature_alpha_dropout",
             "feature_alpha_dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout", "_fused_dropout",
             "multinomial", "binomial", "poisson", "normal", "normal_", "uniform_", "random_", "exponential_",
             "log_normal_", "cauchy_", "geometric_", "_standard_gamma", "_sample_dirichlet", "gumbel_softmax",
             "randint_like", "rrelu", "rrelu_", "fractional_max_pool2d",
             "fractional_max_pool2d_with_indices", "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
             "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention"),
        ),
        drawn,
    ),
    **dict.fromkeys(
        named((torch, F), ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward")), over_sequences
    ),
}  # fmt: skip
"""The rules by function; that of fused projections comes before all others."""
