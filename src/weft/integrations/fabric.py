"""Lightning Fabric with models that weft splits: `Fabric(strategy=WeftStrategy(partitions=2, microbatches=4))`.

A loop that is one's own keeps its form, but for the function that makes a step, which `weft.step` decorates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.communication import objects
from weft.errors import UsageError
from weft.integrations.alike import draw_alike
from weft.integrations.lightning_ranks import JoinsJob, Ranks, fabric, wrapped
from weft.session import ranks
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.model import DistributedModel
from weft.torch.session import current


class WeftStrategy(JoinsJob, fabric.strategies.ParallelStrategy):
    """Splits the models that `fabric.setup` gets over the ranks, which any launcher has started.

    `partitions`: over how many; with more ranks than that, groups of so many train copies. `microbatches`: into how
    many slices a `weft.step` cuts its batch. `settings`: more of `weft.init`'s. Ranks of one copy must read the same
    batches, which is checked at every step, unless `settings` say `checked="first"`.
    """

    def __init__(
        self, partitions: int = 1, microbatches: int = 1, *, checkpoint_io: Any = None, **settings: Any
    ) -> None:
        super().__init__(cluster_environment=Ranks(), checkpoint_io=checkpoint_io)
        given = {"partitions": partitions, "microbatches": microbatches, "checked": "always"}
        self.settings = {**given, **settings}
        self._models: list[DistributedModel] = []

    def __repr__(self) -> str:
        return "<weft.integrations.fabric.WeftStrategy, for Fabric; the Trainer's is weft.integrations.lightning's>"

    def setup_environment(self) -> None:
        self.join(self.precision)
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Each replica reads its own shard, the ranks of one copy the same; one alone reads everything."""
        if ranks.rdp_size() == 1:
            return None
        return {"num_replicas": ranks.rdp_size(), "rank": ranks.rdp_rank()}

    def process_dataloader(self, dataloader: Any) -> Any:
        draw_alike(objects.MP_GROUP)
        return dataloader

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        split = module if isinstance(module, DistributedModel) else DistributedModel(module)
        self._models.append(split)
        return split

    def setup_optimizer(self, optimizer: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS looks at all parameters at once, and a rank has only its own: choose an optimizer that updates "
                "each parameter for itself"
            )
        return wrapped(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        return self.setup_module(module), [self.setup_optimizer(each) for each in optimizers], scheduler

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Inside of a step the model's own; with one partition also outside of it."""
        model = module if isinstance(module, DistributedModel) else None
        if model is None and len(self._models) == 1:
            (model,) = self._models
        if model is None:
            raise UsageError(
                f"fabric.backward(loss) does not know which of {len(self._models)} models: fabric.backward(loss, "
                "model=model)"
            )
        if ranks.mp_size() > 1 and not (current.session().tracing or in_microbatch()):
            raise UsageError(
                "the model is split: call it, and fabric.backward(), in a function decorated with @weft.step"
            )
        model.backward(tensor, *args, **kwargs)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Over the replicas: the ranks of one have the same."""
        result: Tensor = self.reduce(tensor, group, reduce_op)
        return result

    def teardown(self) -> None:
        """The models stay split."""
        if current.is_initialized():
            super().teardown()
