"""PyTorch's private names: all that weft uses, but for process groups (``transport.private_c10d``) and ``DTensor``
(``private_dtensor``).

A private name may be gone, or mean something else, in the next release. So each one is looked up here, once, with what
it is for and what weft does where it is missing: it refuses this PyTorch at ``init``, or goes another way and says so.
``self_check`` runs what is built on them on versions that nobody has tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import UsageError
from weft.transport.private_c10d import Names

NAMES = Names(torch=torch, module=nn.Module(), parameter=nn.Parameter(torch.zeros(1)))
_find = NAMES.find

FUNCTION = "torch.autograd.Function between modules"
CHECKPOINT = "activation checkpoints around modules of several ranks"
REENTRANT = "reentrant activation checkpoints around modules of several ranks"
SCRIPTED = "functions of torch.jit.script between modules"
IN_PLACE = "writing in place between modules"
HOOKS = "forward hooks of modules"
READS = "reading a tensor's value between modules"
REFUSED: dict[str, str] = {}
"""What does not work with this PyTorch, and why; see ``self_check``."""


def refuse(part: str) -> None:
    """Raise if ``part`` does not work with this PyTorch.

    Raises:
        UsageError: The self-check found that it does not.
    """
    if part in REFUSED:
        raise UsageError(f"{part}: this does not work with {REFUSED[part]}")


# --- what runs unwatched: modes ----------------------------------------------------------------------------

pop_mode: Callable[[], Any] = _find("torch._C._pop_torch_function_stack", "units run unwatched")
push_mode: Callable[[Any], None] = _find("torch._C._push_on_torch_function_stack", "units run unwatched")
count_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", "units run unwatched")
no_torch_function: Any = _find("torch._C.DisableTorchFunction", "weft looks at tensors itself")
no_function_of_subclass: Any = _find(
    "torch._C.DisableTorchFunctionSubclass", "sharded tensors answer for themselves"
)
TorchDispatchMode: Any = (
    _find("torch.utils._python_dispatch.TorchDispatchMode", "shapes that depend on data are recognised")
    or object
)
no_dispatch_modes: Any = (
    _find("torch.utils._python_dispatch._disable_current_modes", "causal attention of later positions only")
    or nullcontext
)
_hooks: Any = _find(
    "torch._C._autograd._top_saved_tensors_default_hooks", "keys and values of all ranks are not kept"
)
_hooks_work: Any = (
    _find("torch._C._autograd._saved_tensors_hooks_is_enabled", "keys and values of all ranks are not kept")
    or bool
)


def keeps_as_ever() -> bool:
    """True if nobody but autograd keeps tensors for the backward pass here, as far as is known."""
    return _hooks is not None and _hooks_work() and _hooks(False) is None


_any_autocast = _find(
    "torch._C._is_any_autocast_enabled",
    "autocast between modules",
    "weft asks for the CPU and CUDA, each call",
)


def any_autocast() -> bool:
    """True if autocast is on, for the CPU or CUDA at least."""
    if _any_autocast is not None:
        return bool(_any_autocast())
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# --- modules -----------------------------------------------------------------------------------------------

SLOT = "_compiled_call_impl"
"""Where ``nn.Module.__call__`` looks for a compiled version of the module."""

_find(f"module.{SLOT}", "calls of modules are intercepted")
_find("module._call_impl", "calls of modules are intercepted")
PART_TABLES = ("_modules", "_parameters")
"""Where a module's own dict has its children and its own parameters."""
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The same for its hooks, by their numbers."""
for _name in (
    *PART_TABLES, "_buffers", *HOOK_TABLES, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"
):  # fmt: skip
    _find(
        f"module.{_name}",
        "hooks of modules run where they belong" if "hooks" in _name else "parts of modules",
    )


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of the module runs if it is not intercepted: the compiled version if there is one,
    hooks included."""
    call: Callable[..., Any] = module.__dict__.get(SLOT) or module._call_impl
    return call


def is_compiled(module: nn.Module) -> bool:
    """True if somebody, weft or ``module.compile()``, stands in for the module's call.

    Not one that says by ``runs`` that it runs the module's own code.
    """
    call = module._compiled_call_impl
    return call is not None and not getattr(call, "runs", False)


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and its own buffers, by name; to be changed."""
    return module._parameters, module._buffers


ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""`DistributedDataParallel` asks the module that it wraps for this before all else that all ranks do together."""


def has_backward_hooks(module: nn.Module) -> bool:
    """True if hooks wait for the gradients of the module's inputs or results."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """True if hooks of its own run before or after the module's ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def forward_hook_tables(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The module's hooks before and after ``forward``, by their numbers; to be changed."""
    return module._forward_pre_hooks, module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks before ``forward``, and whether each takes keyword arguments."""
    with_kwargs = module._forward_pre_hooks_with_kwargs
    return [(hook, number in with_kwargs) for number, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks after ``forward``, and whether each takes keyword arguments."""
    with_kwargs = module._forward_hooks_with_kwargs
    return [(hook, number in with_kwargs) for number, hook in module._forward_hooks.items()]


# --- tensors -----------------------------------------------------------------------------------------------

for _name, _purpose in (
    ("_version", "writing in place is noticed"),
    ("_base", "views are known"),
    ("_is_view", "views are known"),
):
    _find(f"parameter.{_name}", _purpose)
_find("torch.UntypedStorage._cdata", "memory without data is recognised")
_wrapped = _find(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch.func in modules",
    "its tensors are taken for others",
)
_users = _find(
    "torch._C._storage_Use_Count", "gradients are averaged where they are", "they are copied into buckets"
)


_CHUNKS = "losses of language models in chunks", "their logits are computed at once"
no_functions: Any = _find("torch._C._disabled_torch_function_impl", *_CHUNKS)
_wrapper: Any = _find("torch.Tensor._make_wrapper_subclass", *_CHUNKS)
UNSAFE_VIEW, TO_COPY, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD = (
    _find(f"torch.ops.aten.{name}.default", *_CHUNKS)
    for name in ("_unsafe_view", "_to_copy", "_log_softmax", "_log_softmax_backward_data")
)
defers = None not in (no_functions, _wrapper, UNSAFE_VIEW, TO_COPY, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD)
"""True if tensors without memory can stand for logits."""


def wrapper(kind: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of a class of one's own, of the sizes and strides of ``like``, without memory."""
    sizes = like.shape, like.stride(), like.storage_offset()
    return _wrapper(kind, *sizes, dtype=like.dtype, device=device)


def writes(func: Any) -> bool:
    """True if an operation of ``torch.ops`` writes into its arguments."""
    return bool(func._schema.is_mutable)


def version(tensor: Tensor) -> int:
    """The number of times that the tensor was written; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def dtypes_of(node: Any) -> set[torch.dtype]:
    """The types of an autograd node's results; none where PyTorch does not say."""
    return {each.dtype for each in getattr(node, "_input_metadata", ())}


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which autograd knows this one to be a view."""
    return tensor._base if tensor._is_view() else None


def has_memory(tensor: Tensor) -> bool:
    """True if it has one piece of memory, as sparse tensors have not, nor those that ``torch.func`` wraps."""
    return tensor.layout == torch.strided and not (_wrapped is not None and _wrapped(tensor))


def storage_key(tensor: Tensor) -> int:
    """A number for the tensor's memory, while it exists; also where it has no data."""
    key: int = tensor.untyped_storage()._cdata  # not int(...): a compiler may follow this
    return key


def users_of_memory(tensor: Tensor) -> int | None:
    """The number of tensors that share the tensor's memory, this question included; None if that is unknown."""
    return None if _users is None else int(_users(storage_key(tensor)))


# --- autograd ----------------------------------------------------------------------------------------------

_APART = "gradients of weights apart from the backward pass", "autograd computes them"
_run = _find(
    "torch.autograd.graph._engine_run_backward", "backward passes", "they begin by torch.autograd.backward"
)
_backward, _grad = torch.autograd.backward, torch.autograd.grad  # weft replaces these two
_number = _find(
    "torch._C._autograd._get_sequence_nr", "times of modules in the backward pass",
    "a module's backward pass counts as twice its forward pass",
)  # fmt: skip
_find(
    "torch.autograd.Variable._execution_engine.queue_callback", "loss.backward() of replicas outside of steps"
)
_find("parameter._post_accumulate_grad_hooks", *_APART)
_find("parameter._backward_hooks", *_APART)
NODES: dict[str, Any] = {}
"""Autograd's types of nodes by name, as far as they and what weft takes from them can be reached."""

for _name, _kept in {
    "AccumulateGrad": (),
    "TBackward0": (),
    "AddmmBackward0": ("_saved_mat1", "_saved_alpha", "_raw_saved_mat1"),
    "MmBackward0": ("_saved_self", "_raw_saved_self"),
    "EmbeddingBackward0": (
        "_saved_indices", "_saved_padding_idx", "_saved_scale_grad_by_freq", "_saved_sparse", "_raw_saved_indices",
    ),
    "ConvolutionBackward0": (
        "_saved_input", "_saved_stride", "_saved_padding", "_saved_dilation", "_saved_transposed",
        "_saved_output_padding", "_saved_groups", "_raw_saved_input",
    ),
}.items():  # fmt: skip
    _found = [
        _find(f"torch._C._functions.{_path}", *_APART) for _path in (_name, *(f"{_name}.{k}" for k in _kept))
    ]
    if None not in _found:
        NODES[_name] = _found[0]


LEAF_NODE: Any = NODES.get("AccumulateGrad")
"""The type of a leaf's node, which adds up the leaf's gradient; None if it cannot be reached."""


def saved(node: Any, name: str) -> Any:
    """The value that the node keeps under that name for the backward pass."""
    return getattr(node, f"_saved_{name}")


PLAIN = "weft_gives_the_same_tensor"
"""An attribute of weft's own hook that unpacks: it computes nothing."""


def is_unpacked(node: Any, name: str) -> bool:
    """True if hooks of others have packed what the node keeps under that name, as activation checkpoints do."""
    hook = getattr(node, f"_raw_saved_{name}").unpack_hook
    return hook is not None and not getattr(hook, PLAIN, False)


_top_hooks = _find(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "activation checkpoints around layers whose parameters are gathered for each microbatch",
    "what such a checkpoint would compute again is kept",
)


def saving_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The functions that pack and unpack the tensors that autograd keeps on this thread; None where nothing does."""
    found: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = _top_hooks(True) if _top_hooks else None
    return found


def run_engine(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: tuple[GradientEdge, ...], keep_graph: bool = False
) -> None:
    """``torch.autograd.backward`` without its checks, which import a symbolic algebra package at their first call."""
    if _run is None:
        _backward(tuple(roots), tuple(grads), keep_graph, inputs=inputs or None)
        return
    _run(tuple(roots), tuple(grads), keep_graph, False, inputs, allow_unreachable=True, accumulate_grad=True)


def capture(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs``; the graph is kept, and no ``.grad`` changes."""
    if _run is None:
        return _grad(tuple(roots), tuple(inputs), tuple(grads), retain_graph=True, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run(
        tuple(roots), tuple(grads), True, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def next_node_number() -> int:
    """A number that grows with every node that this thread makes; 0 where it is unknown."""
    return 0 if _number is None else _number()


def number_of(node: Any) -> int:
    """The node's number, see :func:`next_node_number`; `LEAF_NUMBER` or more for the nodes of leaves."""
    return int(getattr(node, "_sequence_nr", lambda: LEAF_NUMBER)())


LEAF_NUMBER = 1 << 62
"""Nodes from this number on are those of leaves: they accumulate gradients."""
numbers_nodes = _number is not None
"""True if :func:`number_of` shows when a node was made."""


def gradient_hooks(parameter: Tensor) -> Sequence[Callable[[Tensor], None]]:
    """The hooks that autograd runs when it has added to the parameter's ``.grad``."""
    hooks = parameter._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else ()


def hooks_are_known(parameter: Tensor) -> bool:
    """True if all who look at the parameter's gradient are found by :func:`gradient_hooks`."""
    return _HOOKS and not has_tensor_hooks(parameter)


def has_tensor_hooks(parameter: Tensor) -> bool:
    """True if hooks get the parameter's gradient before it is added to ``.grad``."""
    return bool(getattr(parameter, "_backward_hooks", None))


_HOOKS = all(
    NAMES[f"parameter.{name}"].present for name in ("_post_accumulate_grad_hooks", "_backward_hooks")
)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the backward pass that runs on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


_backward_number = _find(
    "torch._C._current_graph_task_id", "checkpoints run again as they ran", "scores are gathered"
)


def in_backward() -> bool:
    """True if a backward pass runs on this thread."""
    return _backward_number is not None and _backward_number() != -1


entering_thread: list[Callable[[], None]] = []
"""Called on each thread that begins a microbatch: settings that PyTorch keeps for each thread."""


# --- sharded tensors --------------------------------------------------------------------------------------

_SHARDED = "tensor parallelism"
_fake_backend = _find("torch._C._distributed_c10d.FakeProcessGroup", _SHARDED, "it is refused")
_register_group = _find("torch._C._distributed_c10d._register_process_group", _SHARDED, "it is refused")
_forget_group = _find("torch._C._distributed_c10d._unregister_process_group", _SHARDED, "it is refused")
_find("torch.distributed.device_mesh.DeviceMesh._setup_world_group_and_device", _SHARDED, "it is refused")


_recomputed = _find(
    "torch.utils.checkpoint._StopRecomputationError", "activation checkpoints around sharded tensors",
    "the rest of a checkpoint is done with full tensors",
)  # fmt: skip
ENDS_A_CHECKPOINT: tuple[type[BaseException], ...] = () if _recomputed is None else (_recomputed,)
"""What ends a checkpoint's second run as soon as all that was asked for is there."""


@contextmanager
def imagined_mesh(size: int, device_type: str, name: str) -> Iterator[DeviceMesh]:
    """A mesh of ``size`` ranks that are not there; this process is the first. Collectives leave memory as it is.

    It needs no other group, and takes nothing from one.

    Raises:
        UsageError: PyTorch cannot make one.
    """
    try:
        group = _imagined_group(size, device_type, name)
        mesh = DeviceMesh(
            device_type, list(range(size)), mesh_dim_names=(name,), _init_backend=False, _rank=0
        )
        mesh._dim_group_names = [group.group_name]
        if hasattr(mesh, "_pg_registry"):
            mesh._pg_registry[group.group_name] = group
    except (AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"PyTorch {torch.__version__} cannot imagine {size} ranks, so what can be split over axis tp cannot be "
            f"found ({error}); take a version that was tested"
        ) from error
    try:
        yield mesh
    finally:
        _forget_group(group.group_name)


def _imagined_group(size: int, device_type: str, name: str) -> Any:
    make = getattr(_fake_backend, "_create_internal", _fake_backend)
    backend = make(0, size, _fake_backend.Options() if hasattr(_fake_backend, "Options") else None)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(dist.HashStore(), 0, size)
    for each in {"cpu", device_type}:
        group._register_backend(torch.device(each), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_group(name, group)
    return group


# --- the rest ----------------------------------------------------------------------------------------------

CHECKPOINT_GENERATOR = NAMES.find_one(
    ("torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",  # since 2.14
     "torch.utils.checkpoint._checkpoint_without_reentrant_generator"),
    "activation checkpoints", "torch.utils.checkpoint.checkpoint is replaced in all modules",
)  # fmt: skip
"""The path of what a checkpointed function runs inside of, unless the checkpoint is reentrant."""

_linear = _find(
    "torch.ops.mkldnn._linear_pointwise.default", "products by oneDNN", "products are PyTorch's usual ones"
)
_find("torch.ops.aten.add.Tensor._schema", "delay_param_initialization")
CONVERSION = _find(
    "torch.ops.aten._to_copy.default", "weights that are converted late", "each rank converts all of them"
)
"""The operation behind `tensor.to(dtype)`; None without it."""
_aten = "torch.ops.aten._scaled_dot_product_flash_attention"
_GENERAL = "a trace without values counts the scores of attention"
fused_attention: Any = _find(f"{_aten}_for_cpu", _GENERAL)
"""Attention that keeps no scores, with gradients on the meta device; None without it."""
ATTENTION = {
    _find(f"{_aten}_for_cpu{end}", _GENERAL): _find(f"{_aten}{end}", _GENERAL) for end in ("", "_backward")
}
"""Operations of it, and others that do as much work, for which PyTorch has formulas."""
_wrapper = _find("torch.Tensor._make_wrapper_subclass", "sharded logits and tokens", "it is refused")
_constructors = _find(
    "torch.utils._device._device_constructors",
    'device="cuda" on a CPU',
    "only the usual constructors know it",
)


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` by oneDNN; AttributeError without it."""
    if _linear is None:
        raise AttributeError("torch.ops.mkldnn._linear_pointwise")
    result: Tensor = _linear(left, right.t(), None, "none", [], "")
    return result


def arguments_of(operator: Any) -> list[Any]:
    """The arguments of an operator of a dispatch mode, as its schema has them."""
    return list(operator._schema.arguments)


def results_of(operator: Any) -> list[Any]:
    """The results of an operator of a dispatch mode, as its schema has them."""
    return list(operator._schema.returns)


_scripted_name = _find(
    "torch.jit._builtins._find_builtin",
    "torch.jit.script beside calls for CUDA on a CPU",
    "functions that make tensors cannot be scripted",
)
_register_script = _find(
    "torch.jit._builtins._register_builtin",
    "torch.jit.script beside calls for CUDA on a CPU",
    "functions that make tensors cannot be scripted",
)


def is_mutable(operator: Any) -> bool:
    """True if an operator writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def without_memory(
    cls: Any, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """A tensor of a subclass that has no memory of its own; dtype and device are those of ``like``."""
    result: torch.Tensor = _wrapper(cls, shape, strides, dtype=like.dtype, device=like.device)
    return result


def scripted_as(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """From now on ``torch.jit.script`` takes one function for the other."""
    if _scripted_name is not None and _register_script is not None and _scripted_name(original) is not None:
        _register_script(replacement, _scripted_name(original))


def constructors() -> Sequence[Callable[..., Any]]:
    """PyTorch's functions that make a tensor on a device that they are given."""
    if _constructors is not None:
        return tuple(_constructors())
    names = (
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    )
    return [getattr(torch, name) for name in names]


# --- what a recording sees ---------------------------------------------------------------------------------

_loader_iterator: Any = _find(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "waits for data are recorded",
    "recordings do not say how long data were waited for",
)


def watch_loaders(around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Whenever an iterator of a ``DataLoader`` is asked for the next batch, that happens inside of ``around()``.

    The result ends it. Without the private class nothing is watched.
    """
    if _loader_iterator is None:
        return lambda: None
    original = _loader_iterator.__next__

    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        with around():
            return original(self)

    def undo() -> None:
        if _loader_iterator.__next__ is next_batch:
            _loader_iterator.__next__ = original

    _loader_iterator.__next__ = next_batch
    return undo
