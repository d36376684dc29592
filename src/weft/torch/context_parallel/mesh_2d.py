"""Layers whose weights are cut over some ranks, and whose sequences over others: this rank's heads of its positions.

Inside of such a layer there are two kinds of tensors. Most are sharded along their positions only. Between two linears
that are cut, tensors are sharded along heads or features as well: a ``DTensor`` on a mesh with both axes, positions
first.

        positions          positions and heads                          positions
    x ── q, k, v: columns ── views, rotary, attention over own heads ── o: row, sum over ranks with other heads ── x
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weft.torch.pytorch.private import version
from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.apply import SplitLinear
from weft.torch.tensor_parallel.cuts import Cut, joined
from weft.torch.tensor_parallel.functions import answer
from weft.torch.tensor_parallel.pieces import local_of
from weft.torch.tensor_parallel.rules import RULES, VIEWS, Unsplittable, new_shape, wrap
from weft.torch.tensor_parallel.shard_group import ShardGroup, enter, leave, new_name, shard_group_of
from weft.torch.tensor_parallel.sharded_activations import AllGathered, plain
from weft.torch.tensor_parallel.splits import COLUMN, ROW, is_transposed
from weft.torch.tensors.cut_weights import own
from weft.torch.tensors.marks import BLOCKS, WINDOW
from weft.torch.tensors.pytree import map_tensors
from weft.torch.tensors.shards import ShardPositions

from . import rules
from .exchange import like
from .rules import OWN, Positions, attention, dropout, norm, product
from .scans import KNOWN
from .shifts import SHIFTS
from .weights import ContextGroup
from .zigzag import register_zigzag


class TensorAndContext(ContextGroup):
    """The ranks that share sequences, for tensors of which other ranks have the other heads.

    Attributes:
        context_group: The same ranks, for tensors with all heads.
        heads: The ranks that split weights.
    """

    def __init__(self, context_group: ContextGroup, heads: ShardGroup, ranks: Tensor) -> None:
        """``ranks``: all of them, those that split weights in a row."""
        mesh = DeviceMesh.from_group(
            [context_group.group, heads.group],
            context_group.mesh.device_type,
            ranks,
            mesh_dim_names=(new_name(), new_name()),
        )
        of = context_group
        super().__init__(mesh, of.group, of.rank, of.size, of.collectives, of.balanced)
        self.context_group, self.heads = context_group, heads
        self.record, self.agree, self.waits = of.record, of.agree, of.waits
        self.attention = of.attention

    @property
    def seat(self) -> int:
        """A number of this rank's own among all that have parts of the tensor."""
        return self.rank * self.heads.size + self.heads.rank

    def uses(self, full: Tensor) -> Tensor:
        return self.context_group.uses(enter(full, self.heads))

    def along_positions(self, tensor: DTensor) -> DTensor:
        blocks = getattr(tensor, BLOCKS)
        local, heads = local_of(tensor), tensor.placements[1]
        if blocks is not None:
            shards = AllGathered.apply(
                local, self.heads, local.ndim - 1, _behind(local.shape[-1], self.heads)
            )
            how = Cut(local.ndim - 1, blocks, tuple(shards.shape))
            local = joined(shards.chunk(self.heads.size, -1), how)
        elif heads.is_shard() or hasattr(heads, "split_factor"):
            times = getattr(heads, "split_factor", 1)  # samples and heads seen as one dimension
            positions = _behind(local.shape[_dim(heads)] // times, self.heads).repeated(times)
            local = AllGathered.apply(local, self.heads, _dim(heads), positions)
        elif heads.is_partial():
            local = leave(local.clone(), self.heads)
        return like(local, tensor, self.context_group)

    def with_heads(self, local: Tensor, given: DTensor, back: int) -> DTensor:
        """The ranks' tensors as one: positions as ``given`` has them, heads along dim ``-back``."""
        heads = local.ndim - back
        placements = (given.placements[0], Shard(heads))
        return _wrapped(
            local, placements, {_dim(placements[0]): given.shape[_dim(given.placements[0])]}, self
        )


def _behind(size: int, shard_group: ShardGroup) -> ShardPositions:
    return ShardPositions.contiguous([size] * shard_group.size)


def _dim(placement: Any) -> int:
    return int(placement.dim)


def _wrapped(local: Tensor, placements: Any, sizes: dict[int, int], shard_group: TensorAndContext) -> DTensor:
    """A ``DTensor`` of what this rank has. ``sizes``: how large sharded dims are; that of heads follows."""
    shape = list(local.shape)
    for dim, size in sizes.items():
        shape[dim] = size
    shape[_dim(placements[1])] = local.shape[_dim(placements[1])] * shard_group.heads.size
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, shard_group.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


class OnMesh2D:
    """Stands for the ``forward`` of a linear whose weight is cut, where it may get sharded positions."""

    def __init__(self, split: SplitLinear, groups: dict[str, TensorAndContext]) -> None:
        """``groups``: by the name of the ranks that share sequences, in each order."""
        self.split, self.groups = split, groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = next(iter((*args, *kwargs.values())), None)
        shard_group = shard_group_of(given) if isinstance(given, DTensor) else None
        if not isinstance(shard_group, ContextGroup) or not isinstance(given, DTensor):
            return self.split(*args, **kwargs)
        if getattr(given, WINDOW) is not None:
            raise Unsplittable("takes some positions")
        if self.split.linear.kind == COLUMN and shard_group.name in self.groups:
            return self._column(given, self.groups[shard_group.name])
        if self.split.linear.kind == ROW:
            return self._row(
                given,
                shard_group if isinstance(shard_group, TensorAndContext) else self.groups[shard_group.name],
            )
        raise Unsplittable("is cut in another way than a linear")

    def _product(self, local: Tensor, shard_group: TensorAndContext, bias: Tensor | None) -> Tensor:
        weight = shard_group.context_group.uses(own(self.split.module, "weight"))
        return F.linear(local, weight.t() if is_transposed(self.split.module) else weight, bias)

    def _column(self, given: DTensor, shard_group: TensorAndContext) -> DTensor:
        # linears that share it share its gradient, unless it was written in between
        known: Any = given._weft_entered  # type: ignore[attr-defined]
        wants = given.requires_grad and torch.is_grad_enabled()
        if known is None or known[0] != version(given) or known[1].requires_grad != wants:
            known = version(given), enter(local_of(given), shard_group.heads)
            given._weft_entered = known  # type: ignore[attr-defined]
        entered = known[1]
        bias = own(self.split.module, "bias")
        local = self._product(
            entered, shard_group, None if bias is None else shard_group.context_group.uses(bias)
        )
        result = shard_group.with_heads(local, given, 1)
        if len(self.split.linear.blocks) > 1:
            setattr(result, BLOCKS, self.split.linear.blocks)
        return result

    def _row(self, given: DTensor, shard_group: TensorAndContext) -> DTensor:
        if isinstance(shard_group_of(given), TensorAndContext):
            if not (getattr(given, BLOCKS) is None and given.placements[1].is_shard(given.ndim - 1)):
                raise Unsplittable("gets other features than its own")
            local = local_of(given)
        else:
            shard = given.shape[-1] // shard_group.heads.size
            local = enter(local_of(given), shard_group.heads).narrow(
                -1, shard_group.heads.rank * shard, shard
            )
        result = leave(self._product(local, shard_group, None), shard_group.heads)
        bias = own(self.split.module, "bias")
        if bias is not None:
            result = result + shard_group.context_group.uses(bias).to(result.dtype)
        return like(result, given, shard_group.context_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnMesh2D:
        copied = memo[id(self)] = OnMesh2D(self.split.__deepcopy__(memo), self.groups)
        return copied


# --- functions -----------------------------------------------------------------------------------------------


def _heads_of(*tensors: Any) -> int:
    """The dim of heads, counted from the last, which is 1; the same in all of them."""
    found = {
        each.ndim - _dim(each.placements[1])
        if len(each.placements) == 2 and each.placements[1].is_shard()
        else 0
        for each in tensors
        if isinstance(each, DTensor)
    }
    if len(found) != 1 or 0 in found:
        raise Unsplittable("has operands in different parts")
    return found.pop()


def own_attention(shard_group: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Attention of this rank's heads."""
    names = ("query", "key", "value", "attn_mask")
    given = {**dict(zip((*names, "dropout_p", "is_causal"), args, strict=False)), **kwargs}
    operands = [given[name] for name in names[:3]]
    if not all(isinstance(each, DTensor) for each in operands):
        raise Unsplittable("has an operand in other parts")
    back, mask = _heads_of(*operands), given.get("attn_mask")
    if back < 3:
        raise Unsplittable("needs whole heads")
    if isinstance(mask, DTensor):
        raise Unsplittable("has a sharded mask")
    if mask is not None:
        if mask.requires_grad:
            raise Unsplittable("has a mask with a gradient")
        given["attn_mask"] = _own_heads(mask, back, operands[0].shape[-back], shard_group)
    return attention(shard_group, func, (), given)


def _own_heads(tensor: Tensor, back: int, total: int, shard_group: TensorAndContext) -> Tensor:
    if tensor.ndim < back or tensor.shape[-back] == 1:
        return tensor
    if tensor.shape[-back] != total:
        raise Unsplittable("has a mask with another number of heads")
    count = total // shard_group.heads.size
    return tensor.narrow(-back, shard_group.heads.rank * count, count)


def own_product(shard_group: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Products of matrices for this rank's heads."""
    if len(args) != 2 or not all(isinstance(each, DTensor) for each in args) or _heads_of(*args) < 3:
        raise Unsplittable("has operands in different parts")
    if args[0].ndim != args[1].ndim or _dim(args[0].placements[0]) != args[0].ndim - 2:
        raise Unsplittable("sums over positions")
    return product(shard_group, func, args, kwargs)


def own_norm(shard_group: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A norm over what comes after heads."""
    x, shape = (*args, *kwargs.values())[:2]
    if _heads_of(x) <= (1 if isinstance(shape, int) else len(shape)):
        raise Unsplittable("is taken over heads")
    return norm(shard_group, func, args, kwargs)


def apart(shard_group: TensorAndContext, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions on the result of a fused projection: as without sharded positions, on those of this rank."""
    given, *rest = args
    position, local = (
        _dim(given.placements[0]),
        wrap(given.to_local(), -1, shard_group.heads, getattr(given, BLOCKS)),
    )
    sizes = {position: given.shape[position]}
    if func in VIEWS:
        shape = new_shape(func, args, kwargs)
        if shape is None or shape[: position + 1] != tuple(given.shape[: position + 1]):
            raise Unsplittable("sees the result of a fused projection in another shape than its blocks'")
        own_shape = (*shape[:position], given.to_local().shape[position], *shape[position + 1 :])
        result = RULES["blocks"](shard_group.heads, Tensor.view, (local, own_shape), {})
    else:
        result = RULES["blocks"](shard_group.heads, func, (local, *rest), kwargs)

    def both(piece: Tensor) -> Tensor:
        if not isinstance(piece, DTensor):
            raise Unsplittable("takes the result of a fused projection as it is")
        made = _wrapped(piece.to_local(), (given.placements[0], piece.placements[0]), sizes, shard_group)
        setattr(made, BLOCKS, getattr(piece, BLOCKS))
        return made

    return map_tensors(result, both)


class HeadsAndPositions(Positions):
    """Answers for sharded tensors along both."""

    rules = {
        **{func: rule for func, rule in OWN.items() if rule in (dropout, rules.joined)},
        F.scaled_dot_product_attention: own_attention,
        **dict.fromkeys(named((torch, Tensor), ("matmul", "__matmul__")), own_product),
        **dict.fromkeys(named((torch, F), ("layer_norm", "rms_norm")), own_norm),
    }

    def taken(self, tensor: Tensor) -> Tensor:
        return plain(tensor)

    def on_shards(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self.shard_group, TensorAndContext)
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, DTensor)]
        if any(shard_group_of(each) is not self.shard_group for each in found):
            raise Unsplittable("has operands in different parts")
        if any(getattr(each, BLOCKS) is not None for each in found):
            return apart(self.shard_group, func, args, kwargs)
        if (func in OWN or func in KNOWN) and func not in self.rules:
            raise Unsplittable("needs all heads")
        if func in SHIFTS and SHIFTS[func](args, kwargs) is not None:
            raise Unsplittable("sees positions of other ranks")
        plain = [
            each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.requires_grad
        ]
        if (
            len(plain) > len(found)
            and func not in self.rules
            and any(each.placements[1].is_shard(each.ndim - 1) for each in found)
        ):
            raise Unsplittable("takes weights for each feature")
        return super().on_shards(func, types, args, kwargs)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """First all heads of this rank's positions: then others answer."""
        assert isinstance(self.shard_group, TensorAndContext)
        if isinstance(tensor, DTensor) and shard_group_of(tensor) is self.shard_group:
            return self.shard_group.along_positions(tensor)
        return tensor

    def wrapped(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or isinstance(tensor, DTensor):
            return tensor
        if not isinstance(tensor, nn.Parameter) or tensor.ndim != 1:
            raise Unsplittable("takes a full tensor with a gradient")
        both = [Replicate(), Replicate()]
        return DTensor.from_local(
            self.shard_group.uses(tensor),
            self.shard_group.mesh,
            both,
            run_check=False,
            grad_placements=[Partial(), Partial()],
        )


def put_on_mesh_2d(roots: list[nn.Module], orders: list[ContextGroup], ranks: Tensor) -> list[ContextGroup]:
    """Let linears in ``roots`` whose weights are cut take sharded positions, in these orders; who answers for them."""
    split = [
        (module, module.__dict__["forward"])
        for root in roots
        for module in root.modules()
        if isinstance(module.__dict__.get("forward"), SplitLinear)
    ]
    if not split:
        return []
    groups = {order.name: TensorAndContext(order, split[0][1].shard_group, ranks) for order in orders}
    for shard_group in groups.values():
        answer(HeadsAndPositions(shard_group))
        if shard_group.balanced:
            register_zigzag(shard_group)
    for module, stands in split:
        module.__dict__["forward"] = OnMesh2D(stands, groups)
    return [*groups.values()]
