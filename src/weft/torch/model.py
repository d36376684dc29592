"""``DistributedModel``: a module that is split over the ranks at its first step."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.errors import UsageError
from weft.torch.backward.autograd import refuse_outside
from weft.torch.delayed_parameters import has_delayed, materialise
from weft.torch.execution.glue import running
from weft.torch.execution.thread_settings import (
    AUTOGRAD,
    backward_taker,
    begin_backward,
    in_microbatch,
    share,
)
from weft.torch.keras_layers import is_of_keras
from weft.torch.placed import changes
from weft.torch.placed.apply import apply, cut_over_sequences, cut_weights
from weft.torch.placed.changes import Outline
from weft.torch.placed.whole_state import whole_state
from weft.torch.pytorch.private import ASKED_BY_DDP, has_backward_hooks
from weft.torch.replicas.comm_hook import HookQueue
from weft.torch.replicas.full_tensors import full_tensor, is_sharded, like
from weft.torch.replicas.reducer import Reducer, ReducerOptions
from weft.torch.replicas.sharding.order import SharingOrder
from weft.torch.replicas.steps import join_steps, make_reducer, synchronise
from weft.torch.session import current
from weft.torch.session.collectives import agree_on
from weft.torch.session.device import device_bytes
from weft.torch.tensor_parallel import Splits, is_cut
from weft.torch.tensors.pytree import bytes_of, map_tensors, tensors_in
from weft.torch.tensors.state_names import fitting, name_faults, shape_faults, shapes_of
from weft.torch.wrappable import check_wrappable

if TYPE_CHECKING:
    from weft.torch.context_parallel.weights import ContextGroup
    from weft.torch.gathering.host_weights import HostWeights
    from weft.torch.replicas.experts.apply import SharedExperts
    from weft.torch.replicas.sharding.between_steps import SharedParameters


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor there, unless it has no data."""
    return tensor if tensor.device.type == "meta" else tensor.to(device)


class DistributedModel(nn.Module):
    """Wraps any ``nn.Module``; call it inside a function decorated with ``weft.step``.

    At the first step the module is traced and split; from then on this rank holds only its own part.
    ``average_grads_across_microbatches``: gradients are those of the mean over the mini-batch; otherwise of the sum
    of the microbatches' losses.

    The other arguments are for replicas on different data, see ``docs/data-parallel.md``:
    ``overlapping_allreduce``: gradients are averaged while the backward pass runs, else at the end of the step.
    ``backward_passes_per_step``: so many steps add up before gradients are averaged. ``bucket_cap_mb``: MiB of
    gradients that travel together. ``broadcast_buffers``: buffers (BatchNorm's statistics, say) are those of the first
    replica after every step. ``gradient_as_bucket_view``: gradients are kept once instead of twice. Parameters without
    a gradient are always found, so ``find_unused_parameters`` changes nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        *,
        average_grads_across_microbatches: bool = True,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = True,
        **other: Any,
    ) -> None:
        super().__init__()
        session = current.session()
        self._options = ReducerOptions(
            25.0 if bucket_cap_mb is None else bucket_cap_mb, overlapping_allreduce, gradient_as_bucket_view,
            backward_passes_per_step, broadcast_buffers,
        )  # fmt: skip
        self.reducer: Reducer | None = None
        self.divide_by_all = True
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        if isinstance(module, DistributedModel):
            raise UsageError("the model is a DistributedModel already: wrap a plain nn.Module, once")
        check_wrappable(module)
        self.module = module
        self.partitioned = False
        self.sharded = False
        self.unsharded: frozenset[str] = frozenset()
        """The names of parameters of a sharded model that every replica has whole."""
        self.sharing_order: SharingOrder | None = None
        self.cut = False
        self.shared: SharedParameters | None = None
        self.host_weights: HostWeights | None = None
        self.experts: SharedExperts | None = None
        self.expert_ids: frozenset[int] = frozenset()
        """The parameters of experts that replicas share, by their ids."""
        self.context_group: ContextGroup | None = None
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self.plan: Any = None
        self.resumed_plan: Any = None
        self.owners: dict[str, int] = {}
        self._after_partition: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after_step: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._deferred_state: tuple[Mapping[str, Any], bool] | None = None
        self._copies: list[weakref.ref[DistributedModel]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self.outline: Any = None
        self.oversized = session.rehearsal is not None or (
            session.pipeline is not None and self._exceeds(device_bytes(session))
        )
        self.move(session.device)
        if has_delayed(module) and session.pipeline is None:
            materialise(module, lambda name: True, session.device, session.streams)
        session.add_model(self)
        session.agreement.add_model(self)
        for optimizer in session.agreement.optimizers:
            self.add_optimizer(optimizer)
        if session.pipeline is None:
            self.finish_partition(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModel:
        """A model of its own that is split as this one is, or will be: an average of weights, say."""
        settings = current.session().settings
        if settings.replica_shards > 1 or settings.offload_weights or has_delayed(self.module):
            raise UsageError(
                "copy.deepcopy does not work for a model whose parameters or experts are shared by replicas, wait in "
                "host memory, or are not made yet: copy its state_dict()"
            )
        self._check_arrived("copy.deepcopy")
        session, options = current.session(), self._options
        new = DistributedModel(
            copy.deepcopy(self.module, memo),
            average_grads_across_microbatches=self.average_grads_across_microbatches,
            overlapping_allreduce=options.overlapping,
            backward_passes_per_step=options.passes,
            bucket_cap_mb=options.bucket_cap_mb,
            broadcast_buffers=options.buffers,
            gradient_as_bucket_view=options.as_view,
        )
        memo[id(self)] = new.train(self.training)
        new.context_group = self.context_group
        if self.plan is not None:
            new._split(self.plan)
            if self.cut:
                new.cut_tensors()
            elif self.plan.tensors is not None:  # a hook after the partition makes the copy
                self._copies.append(weakref.ref(new))
        elif session.pipeline is not None:
            session.known_models.popitem()  # its own steps need not call it: it is split when this one is
            self._copies.append(weakref.ref(new))
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a DistributedModel belongs to its job and is not pickled: torch.save(model.state_dict(), path), or "
            "weft.save_checkpoint(path, tag, model=model)"
        )

    def _split(self, plan: Any) -> None:
        """Take the plan of the model that this one is a copy of."""
        session = current.session()
        apply(self.module, plan, session)
        session.add_model(self)
        self.finish_partition(plan)

    # --- running --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        session = current.session()
        if session.pipeline is not None and backward_taker() is AUTOGRAD:
            offloads = session.settings.offload_weights and session.settings.partitions == 1
            why = (
                "the model's weights wait in host memory"
                if offloads
                else "the model is split over partitions"
            )
            raise UsageError(f"{why}: call it inside a function decorated with @weft.step")
        if session.settings.partitions > 1 and (has_backward_hooks(self) or has_backward_hooks(self.module)):
            raise UsageError(
                "the model as a whole has backward hooks, which get gradients of its input and its output, but it is "
                "split, and no rank has both: put the hooks on a module inside that lies on one partition, or on "
                "tensors (tensor.register_hook)"
            )
        if share() is None and torch.is_grad_enabled():
            if self.training and not session.tracing:
                session.need_all_replicas(
                    "a call of the model outside of a weft.step, whose gradients are averaged,"
                )
            if self.reducer is not None:
                changes.look(session)
        if session.device.type != "cpu":
            args, kwargs = map_tensors((args, kwargs), lambda t: _on(session.device, t))
        glue = running()
        if session.first_inputs and glue is not None:
            args, kwargs = glue.from_first((args, kwargs))
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """In a step also what the wrapped module has: ``model.generate(...)``, ``model.config``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
        found = getattr(module, name)
        if in_microbatch() or (current.is_initialized() and current.session().tracing):
            return found
        advice = f"the wrapped module's is model.module.{name}"
        if callable(found):
            advice = f"call model.{name}(...) in a function decorated with @weft.step, where every rank runs its part"
        if name in ("save_pretrained", "push_to_hub"):
            advice = f"take state = model.state_dict() on all ranks, model.module.{name}(..., state_dict=state) on one"
        raise NoAttributeError(f"a DistributedModel has no {name} of its own: {advice}")

    def backward(self, tensors: Any, grad_tensors: Any = None, retain_graph: bool = False) -> None:
        """The backward pass of this microbatch from one tensor or several; in place of ``tensor.backward()``.

        ``grad_tensors``: their gradients; ``None`` stands for 1, for scalars. Gradients add up in ``.grad``.
        ``retain_graph``: another backward pass of this microbatch may go through the same graph.
        """
        session = current.session()
        if session.pipeline is None and session.mesh.rdp > 1 and not session.went_backward:
            known = {id(parameter) for model in session.models for parameter in model.parameters()}
            refuse_outside(tensors_in(tensors), known)
        scale = self.loss_scale()
        backward_taker().backward(tensors, grad_tensors, retain_graph, scale)

    def loss_scale(self) -> float:
        """The factor of the losses of the present microbatch, whose backward pass begins."""
        begin_backward()
        weight = share()
        scale = weight if self.averages and weight is not None else 1.0
        optimizers = self.optimizers
        if not optimizers:
            return scale
        pending = [p for optimizer in optimizers if (p := optimizer.pending_scale) is not None]
        common = min(pending or [optimizer.loss_scale for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.use_loss_scale(common)
        return scale * common

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that train parameters of this model, in the order of their making."""
        return [found for each in self._optimizers if (found := each()) is not None]

    def add_optimizer(self, optimizer: Any) -> None:
        """Know one more optimizer, as long as it exists, if it trains parameters of this model."""
        own = {id(parameter) for parameter in self.module.parameters()}
        if any(id(weight) in own for weight in optimizer.weights()):
            self._optimizers.append(weakref.ref(optimizer))

    @property
    def averages(self) -> bool:
        """True if gradients are those of the mean over the mini-batch, not of a sum."""
        return self.average_grads_across_microbatches and not self.has_comm_hook

    # --- the partition --------------------------------------------------------------------------------------

    def _exceeds(self, limit_bytes: float) -> bool:
        """True if the values and the gradients of the whole model are more than that."""
        gradients = sum(
            each.nbytes for each in self.module.parameters() if each.requires_grad and not each.is_meta
        )
        return self.held_bytes() + gradients > limit_bytes

    @property
    def estimated(self) -> bool:
        """True if the trace runs the model without its values: they are not made yet, or it is `oversized`."""
        return self.oversized or has_delayed(self.module)

    def move(self, device: torch.device) -> None:
        """Bring modules there that are elsewhere; those of a model that no rank can hold stay."""
        if not self.estimated:
            self.module.to(device)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``nn.Module`` has it.

        Raises:
            UsageError: It is a model of Keras, whose ``compile`` is for ``fit``.
        """
        if is_of_keras(self.module):
            raise UsageError(
                "compile and fit of Keras are there with weft.tensorflow (KERAS_BACKEND=tensorflow): on PyTorch write "
                "a loop around a function that @weft.step decorates"
            )
        super().compile(*args, **kwargs)

    def finish_partition(self, plan: Any) -> None:
        """The model has been split (or is whole, on one partition): bring replicas and deferred states in."""
        self.plan = plan
        self.partitioned = True
        self.owners = {} if plan is None else plan.owners(self.module)
        if plan is not None and plan.experts is not None:
            from weft.torch.replicas.experts.apply import cuts_of_experts  # it loads DTensor

            cuts = cuts_of_experts(self.module, Splits.from_record(plan.experts))
            self.expert_ids = frozenset(id(self.module.get_parameter(name)) for name in cuts)
        for optimizer in self.optimizers:
            optimizer.forget_remote()
        session = current.session()
        with session.doing("the first weights of replicas"):
            synchronise(session, self)
            if session.settings.sharded_data_parallel_degree > 1 and session.pipeline is None:
                from weft.torch.pytorch.private_dtensor import read_whole  # it loads DTensor, as does FSDP2
                from weft.torch.replicas.sharding.fsdp import shard

                self.sharing_order, self.unsharded = shard(session, self.module)
                read_whole(in_microbatch)
                self.sharded = True
            if plan is None or plan.tensors is None:  # else when they are cut
                self._begin_reducing()
        if self._deferred_state is not None:
            content, strict = self._deferred_state
            self._deferred_state = None
            self.load_state_dict(content, strict)
        for each in self.copies:
            each._split(plan)

    def _begin_reducing(self) -> None:
        """The parameters are as they stay: average their gradients from now on."""
        self.outline = Outline(self.module, not self.sharded)
        if self.reducer is not None:
            self.reducer.close()
        self.reducer = make_reducer(current.session(), self, self._options)
        self._use_comm_hook()

    @property
    def copies(self) -> list[DistributedModel]:
        """The models that are split as this one is, because they were copied from it before it was."""
        return [found for each in self._copies if (found := each()) is not None]

    def cut_tensors(self) -> None:
        """Keep only this rank's part of the weights that its plan cuts, and compute on parts of sequences; collective
        over all ranks."""
        for each in self.copies:
            each.cut_tensors()
        self._copies.clear()
        session = current.session()
        if self.plan is not None and self.plan.tensors is not None and not self.cut:
            with session.doing("cutting the weights"):
                cut_weights(self.module, self.plan, self.owners, session)
                self.cut = True
                self._begin_reducing()
                for optimizer in self.optimizers:
                    optimizer.follow_cuts()
        if self.plan is not None and self.plan.sequences is not None:
            with session.doing("cutting sequences"):
                shard_group = cut_over_sequences(self.module, self.plan, self.owners, session)
            if shard_group is not None:
                self.context_group = shard_group
                self.outline = Outline(self.module, not self.sharded)

    def all_reduce_weights(self) -> None:
        """All-reduce gradients of weights that ranks have used for shards of sequences; collective over these."""
        if self.context_group is not None:
            with current.session().doing("the gradients of parts of sequences"):
                self.context_group.all_reduce_weights(self.local_parameters())

    def share_parameters(self) -> None:
        """Keep only this rank's share of each parameter between steps, if its settings say so; collective over the
        replicas."""
        session = current.session()
        degree = session.settings.sharded_data_parallel_degree
        if degree == 1 or self.sharded or self.shared is not None:
            return
        from weft.torch.replicas.sharding.between_steps import SharedParameters  # here: few jobs need it

        with session.doing("sharing the parameters"):
            self.shared = SharedParameters(session, self)
            self.shared.share()
            self._watch_gradients()
        self.cut = True
        for optimizer in self.optimizers:
            optimizer.follow_cuts()

    def offload_weights(self) -> None:
        """Let this rank's weights wait in host memory, if its settings say so."""
        session = current.session()
        if session.settings.offload_weights and self.host_weights is None:
            from weft.torch.gathering.host_weights import HostWeights  # here: few jobs need it

            self.host_weights = HostWeights(self.module, self.plan, session.position("pp"), session.device)

    def _watch_gradients(self) -> None:
        """Let the reducer average the gradients that nobody averages in a microbatch."""
        shared, experts = self.shared, self.experts
        if self.reducer is not None:
            self.reducer.watch([
                (name, parameter)
                for name, parameter in self.local_named_parameters()
                if not (shared and shared.has_in_units(parameter)) and not (experts and experts.has(parameter))
            ])  # fmt: skip

    @property
    def lockstep_degree(self) -> int:
        """The number of replicas that run microbatches in the same order, for they exchange tensors meanwhile."""
        units = None if self.shared is None else self.shared.units
        return max(
            1 if self.experts is None else self.experts.degree,
            1 if units is None else current.session().settings.sharded_data_parallel_degree,
        )

    def share_experts(self) -> None:
        """Keep only this rank's experts, if its plan says that replicas share them; collective over the replicas."""
        if self.plan is None or self.plan.experts is None or self.experts is not None:
            return
        session, splits = current.session(), Splits.from_record(self.plan.experts)
        if not splits.regions:
            return
        from weft.torch.replicas.experts.apply import SharedExperts  # it loads DTensor

        with session.doing("sharing the experts"):
            self.experts = SharedExperts(session, self, splits)
            self._watch_gradients()
        self.cut = True
        self.outline = Outline(self.module, not self.sharded)
        for optimizer in self.optimizers:
            optimizer.follow_cuts()

    def run_partition_hooks(self) -> None:
        """Call the hooks that wait for the partition, each once."""
        self._run_hooks(self._after_partition)

    def run_step_hooks(self) -> None:
        """Call the hooks that wait for the end of a step, each once."""
        self._run_hooks(self._after_step)

    def _run_hooks(self, hooks: OrderedDict[int, Callable[..., Any]]) -> None:
        while hooks:
            _, hook = hooks.popitem(last=False)
            optimizers = self.optimizers
            hook(self, optimizers if len(optimizers) > 1 else next(iter(optimizers), None))

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(model, optimizer)`` runs after the split, before the first forward pass. Of several optimizers it gets
        a list."""
        handle = RemovableHandle(self._after_partition)
        self._after_partition[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(model, optimizer)`` runs after the next step, once."""
        handle = RemovableHandle(self._after_step)
        self._after_step[handle.id] = hook
        return handle

    @property
    def broadcasts_buffers(self) -> bool:
        """True if buffers are those of the first replica after every step."""
        return self._options.buffers

    def get_module(self) -> nn.Module:
        """The wrapped module."""
        return self.module

    def get_submodule(self, target: str) -> nn.Module:
        """A module by its name, as this model has it (`module.layers.0`) or as the wrapped one has it (`layers.0`)."""
        try:
            return super().get_submodule(target)
        except AttributeError:
            return self.module.get_submodule(target)

    def is_local(self, name: str) -> bool:
        """True if the parameter or buffer of that name in the wrapped module lives on this rank."""
        pipeline = current.session().pipeline
        return pipeline is None or self.owners.get(name, pipeline.rank) == pipeline.rank

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of this rank's part; names as in :meth:`named_parameters`."""
        self.need_partition("local_named_parameters()")
        for name, parameter in self.module.named_parameters():
            if self.is_local(name):
                yield f"module.{name}", parameter

    def reduced_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of those in this rank's part whose gradients FSDP2 does not average."""
        found = self.local_named_parameters()
        return [
            each for each in found if not self.sharded or each[0].removeprefix("module.") in self.unsharded
        ]

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's part."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and buffer of this rank's part; constant buffers used between units are on every rank."""
        self.need_partition("local_named_buffers()")
        for name, buffer in self.module.named_buffers():
            if self.is_local(name):
                yield f"module.{name}", buffer

    def held_bytes(self) -> int:
        """Bytes of the parameters and buffers that this rank has in memory just now."""
        return sum(
            bytes_of(each) for each in (*self.module.parameters(), *self.module.buffers()) if not each.is_meta
        )

    def local_buffers(self) -> Iterator[Tensor]:
        """The buffers of this rank's part."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of what runs on this rank: its units with all they contain, and opened modules."""
        self.need_partition("local_named_modules()")
        remote = () if self.plan is None else tuple(self.plan.elsewhere(current.session().position("pp")))
        for name, module in self.module.named_modules():
            if not any(not unit or name == unit or name.startswith(f"{unit}.") for unit in remote):
                yield f"module.{name}" if name else "module", module

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules that run on this rank."""
        return (module for _, module in self.local_named_modules())

    # --- replicas -------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside add up gradients on each replica; the first step after it averages the sum."""
        # sums of averages are averages of sums, so shares of averages add up
        adding_up = self.reducer is not None and self.shared is None
        with self.reducer.suspend() if adding_up and self.reducer is not None else nullcontext():
            yield

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Around a loop over batches that may end earlier on some replicas: these take part in the others' steps.

        They have the others' parameters and buffers at the end. Every replica needs one batch.
        ``divide_by_initial_world_size``: gradients are divided by the number of all replicas, also when some have
        ended; otherwise by those that still train. ``enable``: False does nothing.
        """
        if not enable:
            yield
            return
        current.session().need_all_replicas("join()")
        settings = current.session().settings
        if settings.rebalance:
            raise UsageError(
                "join() does not fit rebalance, for which all replicas compare their times: give all replicas the same "
                "number of batches, or leave rebalance out"
            )
        if settings.shard_optimizer_state or settings.replica_shards > 1:
            raise UsageError(
                "join() does not fit shard_optimizer_state, sharded_data_parallel_degree and expert_parallel_degree, "
                "because every replica is needed to the end: give all replicas the same number of batches"
            )
        with join_steps(current.session(), self, divide_by_initial_world_size):
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket)`` replaces the averaging of dense gradients, as in PyTorch's DDP.

        The bucket has the interface of ``torch.distributed.GradBucket``; the hook returns a future of its flat tensor.
        It divides by the replicas itself, and by the microbatches: their gradients are summed.
        """
        if self._comm_hook is not None:
            raise UsageError("the model has a communication hook already; a model takes one")
        if not callable(hook):
            raise UsageError(f"a communication hook is a function, not {hook!r}")
        current.session().need_all_replicas("a communication hook")
        if current.session().settings.replica_shards > 1:
            raise UsageError(
                "a communication hook does not fit sharded_data_parallel_degree and expert_parallel_degree, where "
                "gradients travel in other ways: leave the hook out"
            )
        self._comm_hook = state, hook
        self._use_comm_hook()

    @property
    def has_comm_hook(self) -> bool:
        """True if a communication hook averages gradients."""
        return self._comm_hook is not None

    def _use_comm_hook(self) -> None:
        if self._comm_hook is not None and self.reducer is not None:
            self.reducer.use(HookQueue(*self._comm_hook, self.reducer.describe_bucket))

    # --- states ---------------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole model's state, names as in the wrapped module; collective over the pipeline after the partition,
        and over all ranks if replicas share parameters.

        ``gather_to_rank0``: only the pipeline's first rank gets it, the others an empty dict.
        """
        session = current.session()
        self._check_arrived("state_dict()")
        content = self._whole_state(*args, **kwargs)
        if self.sharded and gather_to_rank0 and session.rank != 0:
            return {}
        if session.pipeline is None or not self.partitioned:
            return content
        prefix = kwargs.get("prefix", "")  # of a module that has this one as a child
        with session.doing("state_dict()"):
            return whole_state(session, self.module, self.owners, content, prefix, gather_to_rank0)

    def _whole_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content = self.module.state_dict(*args, **kwargs)
        if self.sharded:
            with current.session().doing("state_dict()"):
                return {
                    name: full_tensor(value) if is_sharded(value) else value
                    for name, value in content.items()
                }
        prefix = kwargs.get("prefix", "")
        with current.session().doing("state_dict()") if self.cut else nullcontext():
            for name, parameter in self.module.named_parameters(remove_duplicate=False) if self.cut else ():
                if is_cut(parameter) and f"{prefix}{name}" in content:
                    content[f"{prefix}{name}"] = full_tensor(content[f"{prefix}{name}"], parameter)
        return content

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the state; names as in :meth:`named_parameters`, and the key ``_smp_is_partial``."""
        self.need_partition("local_state_dict()")
        content = self._whole_state(*args, **kwargs)
        local = {f"module.{name}": value for name, value in content.items() if self.is_local(name)}
        local["_smp_is_partial"] = current.session().pipeline is not None
        return local

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take a whole state before or after the partition, or one from :meth:`local_state_dict` after it.

        Names are those of the wrapped module, or as ``DataParallel`` and ``torch.compile`` change them. With
        ``strict``, names or shapes that do not fit are one error that lists them all, and nothing is loaded.
        Returns the ``missing_keys`` and ``unexpected_keys``, as PyTorch does; of a partial state before the partition
        none, for it is loaded right after that.
        """
        partial = bool(state_dict.get("_smp_is_partial", False))
        if partial and not self.partitioned:
            self._deferred_state = (state_dict, strict)
            return nn.Module().load_state_dict({})
        own = self.module.state_dict(keep_vars=True)
        means = fitting((name for name in state_dict if name != "_smp_is_partial"), own)
        content = {means[name]: value for name, value in state_dict.items() if name in means}
        expected = {name for name in own if not partial or self.is_local(name)}
        missing = [name for name in own if name in expected and name not in content]
        unexpected = [name for name in content if name not in own]
        faults = name_faults(missing, unexpected) if strict else []
        faults += shape_faults(shapes_of(content), shapes_of(own))
        if faults:
            raise UsageError("the state does not fit the model: " + "; ".join(faults))
        current.session().agreement.note_load(self)
        if not self.partitioned:
            self._deferred_state = None  # this one is newer
            return self.module.load_state_dict(content, strict=strict, assign=assign)
        with torch.no_grad():
            for name, target in own.items():
                if name in content and isinstance(target, Tensor) and self.is_local(name):
                    target.copy_(like(content[name], target))
        keys = nn.Module().load_state_dict({})
        keys.missing_keys.extend(missing)
        keys.unexpected_keys.extend(unexpected)
        return keys

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """PyTorch's: a module that has this one as a child loads its state."""
        current.session().agreement.note_load(self)
        super()._load_from_state_dict(*args, **kwargs)

    def _check_arrived(self, what: str) -> None:
        """Raise :class:`UsageError` if the weights are not yet those that the model is to have."""
        if self._deferred_state is not None:
            raise UsageError(
                f"{what} before the first step would have the weights from before load_state_dict(): a partial state "
                "is loaded when the first step has split the model. Call it after that step"
            )
        if not self.partitioned and has_delayed(self.module):
            raise UsageError(
                f"{what} before the first step would have no values: parameters whose making is delayed are made when "
                "that step has split the model. Call it after that step"
            )

    def need_partition(self, what: str) -> None:
        """Raise :class:`UsageError` before the partition."""
        if not self.partitioned and self.plan is None:  # a rehearsal has a plan, and splits nothing
            raise UsageError(f"{what} is known only after the partition, which the first step makes")


class NoAttributeError(UsageError, AttributeError):
    """Something of the wrapped module was asked of the model, outside of a step."""


def _refuse_ddp(model: DistributedModel) -> NoReturn:
    """Both would average gradients, and DDP waits for parameters that lie on other ranks."""
    raise UsageError(
        "DistributedDataParallel around a DistributedModel would average gradients a second time, and wait for "
        "parameters of other ranks: leave it out, weft averages over replicas by itself"
    )


setattr(DistributedModel, ASKED_BY_DDP, property(_refuse_ddp))


def agree_on_size(session: Any, models: Sequence[DistributedModel]) -> None:
    """Let all ranks take a model for too large that the first rank does, and bring the others to their devices."""
    if session.pipeline is None:
        return
    words = agree_on(
        session, lambda: " ".join(str(int(model.oversized)) for model in models), "the models' sizes"
    )
    for model, word in zip(models, words.split(), strict=True):
        model.oversized = word == "1"
        model.move(session.device)
