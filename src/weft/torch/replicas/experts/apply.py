"""A model whose experts replicas share: each keeps its own, and calls of their modules exchange rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import UsageError
from weft.session.recording import record
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.replicas.steps import backend_of, new_group
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.cuts import Cut, cut_in_place, is_cut
from weft.torch.tensor_parallel.experts.expert_parallel import cuts_of_mixture, misfit_of_mixture
from weft.torch.tensor_parallel.experts.sharded_experts import cuts_of_experts as cuts_of_weights
from weft.torch.tensor_parallel.experts.sharded_experts import misfit
from weft.torch.tensor_parallel.splits import MIXTURE, Linear
from weft.torch.tensors.cut_weights import guard
from weft.torch.tensors.marks import CUT

from .dispatch import Dispatched
from .exchange import HOST, ExpertGroup
from .mixture import SharedMixture


def expert_group(session: Session) -> ExpertGroup:
    """The replicas that share experts with this one; each of them calls this."""
    ranks, degree = session.peers("rdp"), session.settings.expert_parallel_degree
    row, place = divmod(session.position("rdp"), degree)
    backend = backend_of(session)
    group = new_group(session, ranks[row * degree : (row + 1) * degree], backend)
    return ExpertGroup(group, place, degree, session.device if backend == "nccl" else HOST)


def mark_experts(session: Session, root: nn.Module, splits: Splits, is_local: Callable[[str], bool]) -> None:
    """Mark parameters without memory as this rank's experts, so that only these are made; collective.

    ``is_local``: whether a parameter lives on this rank, by its name.
    """
    if not splits.regions:
        return
    group = expert_group(session)
    for name, how in cuts_of_experts(root, splits).items():
        if is_local(name):
            cut_in_place(root.get_parameter(name), how, group)


def cuts_of_experts(root: nn.Module, splits: Splits) -> dict[str, Cut]:
    """The cuts of all parameters of experts that replicas share, by name."""
    found: dict[str, Cut] = {}
    for name, linear in splits.linears().items():
        module, prefix = root.get_submodule(name), f"{name}." if name else ""
        cuts = cuts_of_mixture(module, linear) if linear.kind == MIXTURE else cuts_of_weights(module, linear)
        found |= {f"{prefix}{own}": how for own, how in cuts.items()}
    return found


def _group_of(root: nn.Module, splits: Splits) -> ExpertGroup | None:
    """The group for which parameters are marked by now."""
    for name in splits.linears():
        for parameter in root.get_submodule(name).parameters():
            for _, holders in getattr(parameter, CUT) or ():
                if isinstance(holders, ExpertGroup):
                    return holders
    return None


class SharedExperts:
    """The experts of this rank's part of ``model``, which are whole at first; collective over the replicas.

    Attributes:
        degree: How many replicas share experts.
        weights: The parameters of which this rank has those of its experts, by name; other replicas average them not.

    Raises:
        UsageError: The plan is for another number of replicas, or for other modules. Nothing was changed.
    """

    def __init__(self, session: Session, model: Any, splits: Splits) -> None:
        ranks, degree = session.peers("rdp"), session.settings.expert_parallel_degree
        self.degree = degree
        _check(model.module, splits, degree)
        self._session = session
        self._group = _group_of(model.module, splits) or expert_group(session)
        self._group.record = partial(record, session, "tensor")
        self._group.agree = self._agree
        others = ranks[self._group.rank :: degree]
        self._column = new_group(session, others, backend_of(session)) if len(others) > 1 else None
        self.weights: dict[str, nn.Parameter] = {}
        self._mixtures: dict[str, SharedMixture] = {}
        for name, linear in splits.linears().items():
            module = model.module.get_submodule(name)
            stands: Any
            if linear.kind == MIXTURE:
                stands = SharedMixture(module, name, linear, self._group, session.streams)
            else:
                stands = Dispatched(module, name, linear, self._group)
            prefix = f"{name}." if name else ""
            if all(model.is_local(f"{prefix}{each}") for each in stands.cuts):
                self._share(module, prefix, stands)
        self._ids = {id(weight) for weight in self.weights.values()}

    def _share(self, module: nn.Module, prefix: str, stands: Any) -> None:
        """Keep this rank's part of a module's weights, and let ``stands`` stand for its ``forward``."""
        for own, how in stands.cuts.items():
            parameter = module.get_parameter(own)
            if not is_cut(parameter):
                cut_in_place(parameter, how, self._group)
            self.weights[f"{prefix}{own}"] = parameter
        for owner in {own.rpartition(".")[0] for own in stands.cuts}:
            guard(module.get_submodule(owner))
        module.__dict__["forward"] = stands
        if isinstance(stands, SharedMixture):
            self._mixtures[prefix] = stands
            for expert, stands_inside in stands.members().items():
                expert.__dict__["forward"] = stands_inside

    def _agree(self, what: str) -> None:
        executor = self._session.executor
        if executor is not None and executor.turns is not None and in_microbatch():
            executor.turns.agree(what)

    def has(self, parameter: torch.Tensor) -> bool:
        """True if the parameter is one of experts, of which this rank has some."""
        return id(parameter) in self._ids

    @torch.no_grad()
    def average(self) -> None:
        """Average gradients over the replicas that have the same experts; each group has averaged over its own.

        An expert that got rows of some replica has a gradient on all, an empty one where its weights are elsewhere.
        """
        for prefix, mixture in self._mixtures.items():
            for own in mixture.take_touched():
                weight = self.weights[f"{prefix}{own}"]
                if weight.requires_grad and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        if self._column is None or not self.weights:
            return
        weights = [each for each in self.weights.values() if each.requires_grad]
        present = torch.tensor([each.grad is not None for each in weights], dtype=torch.int32)
        dist.all_reduce(present, group=self._session.group("rdp"))
        for weight, count in zip(weights, present.tolist(), strict=True):
            if not count:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            total = weight.grad.to(self._group.device).contiguous()
            dist.all_reduce(total, group=self._column)
            weight.grad.copy_(total / dist.get_world_size(self._column))


def _check(model: nn.Module, splits: Splits, degree: int) -> None:
    faults = []
    if splits.size != degree:
        faults.append(f"it is for {splits.size} replicas, and expert_parallel_degree is {degree}")
    modules = dict(model.named_modules())
    for name, linear in splits.linears().items():
        if name not in modules:
            faults.append(f"the model has no {name}")
        elif fault := _misfit(modules[name], linear, degree):
            faults.append(f"{name}: {fault}")
    if faults:
        raise UsageError(f"this layout of experts does not belong to this model: {'; '.join(faults)}")


def _misfit(module: nn.Module, linear: Linear, degree: int) -> str:
    """Why the module's experts cannot be shared so; empty if they can, or are."""
    if any(map(is_cut, module.parameters())):
        return ""
    return misfit_of_mixture(module, linear, degree) if linear.kind == MIXTURE else misfit(module, linear)
