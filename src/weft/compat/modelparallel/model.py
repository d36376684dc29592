"""``smp.DistributedModel``: weft's, with what only scripts for the original use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.compat.dataparallel import ds_names
from weft.compat.modelparallel.session import state
from weft.compat.modelparallel.tensor_parallel.contexts import replaced
from weft.errors import UsageError, warn
from weft.torch import model as weft_model
from weft.torch.session import current as session_of
from weft.torch.session.collectives import gather_tensors, gather_texts
from weft.torch.tensor_parallel import axes_of
from weft.torch.tensors.marks import WRAPPER
from weft.torch.tensors.pytree import map_tensors

_FORWARDED = (
    "overlapping_allreduce", "backward_passes_per_step", "average_grads_across_microbatches", "bucket_cap_mb",
    "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view",
)  # fmt: skip
_POSITIONAL = (
    "trace_device", "trace_execution_times", "overlapping_allreduce", "backward_passes_per_step",
    "average_grads_across_microbatches", "bucket_cap_mb", "trace_memory_usage", "broadcast_buffers",
    "find_unused_parameters", "gradient_as_bucket_view",
)  # fmt: skip


class _Once(type):
    """A module that is wrapped a second time gives the wrapper that it has: Hugging Face's Trainer does that."""

    def __call__(cls, module: Any, *args: Any, **kwargs: Any) -> Any:
        known: _Wrapper | None = module.__dict__.get(WRAPPER) if isinstance(module, nn.Module) else None
        if known is not None:
            return known.model
        wrapper = super().__call__(module, *args, **kwargs)
        module.__dict__[WRAPPER] = _Wrapper(wrapper)
        return wrapper


@dataclass
class _Wrapper:
    """The wrapper that a module has. A copy of the module, or its pickle, has none."""

    model: Any

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class DistributedModel(weft_model.DistributedModel, metaclass=_Once):
    """Wraps an ``nn.Module``; call it inside a function decorated with ``smp.step``.

    Arguments as in the original; ``trace_device``, ``trace_execution_times`` and ``trace_memory_usage`` are checked and
    change nothing, because the first step is always traced where the model is, with times and memory.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"DistributedModel takes at most {len(_POSITIONAL) + 1} positional arguments")
        given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        unknown = sorted(set(given) - set(_POSITIONAL))
        if unknown:
            warn(f"DistributedModel ignores {', '.join(unknown)}")
        device = given.get("trace_device", "gpu")
        if device not in ("gpu", "cpu"):
            raise UsageError(f'trace_device is {device!r}: write "gpu" or "cpu"')
        if device == "cpu" and given.get("trace_execution_times"):
            raise UsageError('trace_execution_times needs trace_device="gpu": leave one of them out')
        if session_of.session().mesh.tp > 1 and isinstance(module, nn.Module):
            module = replaced(module)
        half = torch.float16 if state.cfg.fp16 else torch.bfloat16 if state.cfg.bf16 else None
        if half is not None and isinstance(module, nn.Module):
            module.to(half)
        super().__init__(
            module, device, **{name: given[name] for name in _FORWARDED if given.get(name) is not None}
        )
        self.half_dtype = half
        if self.sharded:
            ds_names.install()
        if not hasattr(module, "module"):  # scripts of 2021 and 2022 write model.module.module
            module.__dict__["module"] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        half = self.half_dtype
        if half is None:
            return super().forward(*args, **kwargs)

        def lower(tensor: Tensor) -> Tensor:
            return tensor.to(half) if tensor.dtype == torch.float32 else tensor

        def raise_(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype == half else tensor

        args, kwargs = map_tensors((args, kwargs), lower)
        return map_tensors(super().forward(*args, **kwargs), raise_)

    # --- states ---------------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole model's state; every rank of a pipeline calls it. See weft's."""
        kwargs.pop("cast_to_cpu", None)
        return super().state_dict(*args, gather_to_rank0=gather_to_rank0, **kwargs)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the state, with the key ``_smp_is_partial``."""
        for name in ("cast_to_cpu", "gather_if_shard"):
            kwargs.pop(name, None)
        content = super().local_state_dict(*args, **kwargs)
        content["_smp_is_partial"] = True
        return content

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Take a whole state, or the partial ones of all ranks of a pipeline; now or, if needed, at the partition.

        Partial states are gathered first, so every rank of the pipeline calls it. ``same_partition_load``: nothing
        is sent, unless the model is split otherwise than it was and some rank lacks a part of its own.
        """
        session = session_of.session()
        partial = bool(state_dict.get("_smp_is_partial", False))
        if partial and not self.partitioned:
            self._deferred_state = ({**state_dict, "_smp_same_partition": same_partition_load}, strict)
            return None
        content = dict(state_dict)
        same_partition_load = bool(content.pop("_smp_same_partition", same_partition_load))
        if partial and session.pipeline is None:
            content["_smp_is_partial"] = False
        elif partial:
            tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
            lacks = any(
                f"module.{name}" not in content and self.is_local(name) for name in self.module.state_dict()
            )
            with session.doing("load_state_dict()"):
                lacking = gather_texts(str(int(lacks)), session.group("pp"))
                if not same_partition_load or "1" in lacking:
                    content = gather_tensors(tensors, {}, session.group("pp"), session.peers("pp"))
        result = super().load_state_dict(content, strict, assign)
        for optimizer in self.optimizers:
            optimizer.forget_masters()
        return result

    def cpu(self) -> DistributedModel:
        """Bring the whole model to the CPU of every rank of the pipeline; every rank calls it. It cannot be trained
        any more then."""
        if self.sharded:
            raise UsageError(
                "cpu() does not fit sharded_data_parallel_degree: load model.state_dict() into a model on the CPU"
            )
        content = self.state_dict()
        with torch.no_grad():
            own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            for name, tensor in own.items():
                value = content.get(name)
                if isinstance(value, Tensor):
                    tensor.data = value.detach().cpu().clone()
        return super().cpu()

    _register_comm_hook = weft_model.DistributedModel.register_comm_hook
    """The name that it had before 1.3."""

    # --- tensor parallelism ---------------------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules of which this rank holds parts of parameters; known after the first step."""
        for module in self.module.modules():
            if any(map(self.is_distributed_parameter, module.parameters(recurse=False))):
                yield module

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """True if this rank holds a part of a parameter, and ranks that split tensors with it the others.

        Raises:
            UsageError: The model has no partition yet, which says what is cut.
        """
        if session_of.session().mesh.tp == 1:
            return False
        if not self.partitioned:
            raise UsageError(
                "which parameters are cut over tensor-parallel ranks is known after the first step: ask then"
            )
        return "tp" in axes_of(parameter)

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """True if a buffer is split: no."""
        return False

    def is_scaled_batch_parameter(self, parameter: Tensor) -> bool:
        """True if a parameter sees the batches of all tensor-parallel ranks: no."""
        return False

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """True if a buffer sees the batches of all tensor-parallel ranks: no."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over ``DP_GROUP``: all of this rank."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over ``RDP_GROUP`` only: none."""
        return iter(())
