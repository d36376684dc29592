"""What a script does between steps, in one process and over the ranks of a job.

    rate, weights, states    set or loaded, maybe by one rank alone
    written                  a weight that the script multiplies
    average, copy            an average of the model from now on: PyTorch's, or a deep copy
    evaluation               scores of a batch
    not finite               one gradient of the next step is NaN or inf; its norm is looked at, and the step dropped
    resumed                  saved, and gone on with in another layout

What one rank alone loads or sets before the first step counts if it is the first rank. After that step it has to be an
error.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft.torch as weft

NORMS = (2.0, float("inf"), 1.0)
SHARED = ("sharded_data_parallel_degree", "shard_optimizer_state")


class SilentError(Exception):
    """One rank alone did what ends in an error, and there was none."""


def new_net(names: Mapping[str, Any], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    net: nn.Module = names["Model"]()
    return net.double()


def copies_of(ranks: int, settings: Mapping[str, Any]) -> int:
    """Of the model, in a job of so many ranks."""
    keys = ("partitions", "tensor_parallel_degree", "context_parallel_degree")
    for key in keys:
        ranks //= settings.get(key, 1)
    return ranks


def one_rank_may(kind: str, settings: Mapping[str, Any]) -> bool:
    """Whether one rank alone can do it: what ranks share is loaded by all of them, and a weight that only one rank has
    is its own to write."""
    if kind == "rate":
        return True
    if kind in ("weights", "states"):
        return not any(key in settings for key in SHARED)
    alike = "partitions" not in settings and "tensor_parallel_degree" not in settings
    return kind == "written" and alike and "sharded_data_parallel_degree" not in settings


class Job:
    """What trains: one process, or this rank of several. `begun`: whether there was a step in this layout."""

    model: Any
    optimizers: list[Any]

    def __init__(self, names: Mapping[str, Any], ranks: int) -> None:
        self.names, self.settings, self.ranks = names, names["SETTINGS"], ranks
        self.begun = False
        self.silent = ""
        self.averages: dict[str, Any] = {}

    @property
    def copies(self) -> int:
        return copies_of(self.ranks, self.settings)

    @property
    def copy(self) -> int:
        """The one that is here."""
        return 0

    def happen(self, kind: str, at: int, alone: bool, pick: Any) -> dict[str, Tensor]:
        """Let it happen; gives what is to compare. `silent`: what the next step has to refuse."""
        if kind == "evaluation":
            return {"scores in between": self.scores(self.batch(at))}
        if kind == "resumed":
            if at:
                self.resume(pick)
                self.begun = False
                self.averages.clear()
        elif not (alone and one_rank_may(kind, self.settings)):
            self.do(kind, pick)
        else:
            rank = pick % 2 * (self.ranks - 1)
            if self.is_rank(rank):
                self.do(kind, pick)
            if self.begun:
                self.silent = f"rank {rank} alone changed: {kind}"
        return {}

    def do(self, kind: str, pick: int) -> None:
        optimizer = self.optimizers[pick % len(self.optimizers)]
        if kind == "rate":
            optimizer.param_groups[-1]["lr"] *= 0.5
        elif kind == "weights":
            self.model.load_state_dict(new_net(self.names, 4).state_dict())
        elif kind == "states":
            optimizer.load_state_dict(self.trained()[pick % len(self.optimizers)])
        elif kind == "written":
            parameters = [*self.model.parameters()]
            with torch.no_grad():
                parameters[pick % len(parameters)].mul_(0.9)
        elif kind == "average":
            self.averages[kind] = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        elif kind == "copy":
            self.averages[kind] = copy.deepcopy(self.model)

    def trained(self) -> list[Any]:
        """States of the optimizers after a step of their own."""
        net = new_net(self.names)
        optimizers = self.names["optimizers_of"](net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.01) if parameter.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()
        return [optimizer.state_dict() for optimizer in optimizers]

    def follow(self) -> None:
        """The averages, after a step."""
        if "average" in self.averages:
            self.averages["average"].update_parameters(self.model)
        if "copy" in self.averages:
            with torch.no_grad():
                for mean, now in zip(
                    self.averages["copy"].parameters(), self.model.parameters(), strict=True
                ):
                    mean.lerp_(now, 0.25)

    def averaged(self) -> Iterator[tuple[str, Tensor]]:
        for kind, average in self.averages.items():
            model = average.module if kind == "average" else average
            for name, value in model.state_dict().items():
                yield f"{kind} {name}", value.clone()

    def ruin(self, pick: int) -> dict[str, Tensor]:
        """Makes a gradient NaN or inf, and takes its norm."""
        parameters = [p for p in new_net(self.names).named_parameters() if p[1].requires_grad]
        if not parameters:
            return {}
        bad = float("inf") if pick % 2 else float("nan")
        self.fill(parameters[pick % len(parameters)][0], bad, pick)
        norm = self.clip(NORMS[pick % len(NORMS)])
        found = {"norm of what is not finite": norm}
        if norm.isnan():
            for name, gradient in self.gradients():
                found[f"gradient {name} is NaN"] = gradient.isnan().all().double()
        return found

    def clip(self, kind: float = 2.0) -> Tensor:
        """Clips the gradients; their norm."""
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, kind).detach()
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def batch(self, number: int) -> Tensor:
        numbers = torch.Generator().manual_seed(11 + number)
        return torch.randint(0, 17, (self.names["ROWS"], self.names["LENGTHS"][number]), generator=numbers)

    def kept(self) -> Tensor | None:
        """Which samples count. Of copies that share parameters none takes a part out."""
        if self.names["COUNTED"] is None or "sharded_data_parallel_degree" in self.settings:
            return None
        quarters = torch.tensor(self.names["COUNTED"])
        each = self.names["ROWS"] // self.copies // len(quarters)
        return torch.cat([quarters.roll(copy).repeat_interleave(each) for copy in range(self.copies)])

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def is_rank(self, rank: int) -> bool:
        raise NotImplementedError

    def train(self, words: Tensor) -> Tensor:
        raise NotImplementedError

    def scores(self, words: Tensor) -> Tensor:
        raise NotImplementedError

    def fill(self, name: str, bad: float, pick: int) -> None:
        raise NotImplementedError

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    def resume(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings


def local_part(gradient: Any) -> Any:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def loss_of(
    names: Mapping[str, Any], given: tuple[Tensor, Any], words: Tensor, kept: Tensor | None
) -> Tensor:
    scores = given[0]
    if kept is not None:
        scores, words = scores[kept], words[kept]
    loss: Tensor = names["loss_of"](scores, words) + 0.1 * given[1]
    return loss


class Alone(Job):
    """One process, on microbatches as all replicas have them together."""

    def __init__(self, names: Mapping[str, Any], ranks: int) -> None:
        super().__init__(names, ranks)
        self.model = new_net(names)
        self.optimizers = names["optimizers_of"](self.model.parameters())

    def parts(self, tensor: Tensor) -> list[Tensor]:
        each = self.names["SETTINGS"]["microbatches"]
        return [part for share in tensor.chunk(self.copies) for part in share.chunk(each)]

    def is_rank(self, rank: int) -> bool:
        return rank == 0

    def train(self, words: Tensor) -> Tensor:
        kept = self.kept()
        parts = self.parts(words)
        masks = [None] * len(parts) if kept is None else self.parts(kept)
        weights = [1 if mask is None else int(mask.sum()) for mask in masks]  # replicas count alike
        losses = []
        for part, mask, weight in zip(parts, masks, weights, strict=True):
            loss = loss_of(self.names, self.model(part), part, mask)
            if weight:
                (loss * weight / sum(weights)).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def scores(self, words: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            found = torch.cat([self.model(part)[0] for part in self.parts(words)])
        self.model.train()
        return found

    def fill(self, name: str, bad: float, pick: int) -> None:
        gradient = self.model.get_parameter(name).grad
        if gradient is not None:
            gradient.fill_(bad)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def resume(self, settings: Mapping[str, Any]) -> None:
        super().resume(settings)
        for parameter in self.model.parameters():
            parameter.grad = None


class Split(Job):
    """This rank of a job that is running."""

    def __init__(self, names: Mapping[str, Any], more: Mapping[str, Any], ranks: int) -> None:
        super().__init__(names, ranks)
        self.more = more
        self.folders: list[str] = []
        self.build()

    def build(self) -> None:
        assert self.copies == weft.rdp_size()
        vars(self).pop("steps", None)
        self.net = new_net(self.names)
        self.model = weft.DistributedModel(self.net)
        made = self.names["optimizers_of"](self.model.parameters())
        self.optimizers = [weft.DistributedOptimizer(each) for each in made]

    @functools.cached_property
    def steps(self) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        names = self.names

        @weft.step
        def plain(model: Any, words: Tensor) -> Tensor:
            loss = loss_of(names, model(words), words, None)
            model.backward(loss)
            return loss

        @weft.step(weight=lambda model, words, kept: kept.sum())
        def weighted(model: Any, words: Tensor, kept: Tensor) -> Tensor:
            loss = loss_of(names, model(words), words, kept)
            model.backward(loss)
            return loss

        @weft.step
        def scores(model: Any, words: Tensor) -> Tensor:
            result: Tensor = model(words)[0]
            return result

        return plain, weighted, scores

    @property
    def copy(self) -> int:
        return weft.rdp_rank()

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.copies)[self.copy]

    def is_rank(self, rank: int) -> bool:
        return rank == weft.rank()

    def train(self, words: Tensor) -> Tensor:
        plain, weighted, _ = self.steps
        kept = self.kept()
        more = [] if kept is None else [self.mine(kept)]
        step = weighted if more else plain
        return torch.stack([each.detach() for each in step(self.model, self.mine(words), *more).outputs])

    def scores(self, words: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            outputs = self.steps[2](self.model, self.mine(words)).outputs
        self.model.train()
        return torch.cat([each.detach() for each in outputs])

    def fill(self, name: str, bad: float, pick: int) -> None:
        """On one of the ranks that share tensors alike, if it has a part of this one; else on all that have one."""
        local = {name.removeprefix("module."): p for name, p in self.model.local_named_parameters()}
        gradient = local_part(local[name].grad) if name in local else None
        has = gradient is not None and gradient.numel() > 0
        chosen = weft.tp_rank() == pick // 2 % weft.tp_size()
        some = "context_parallel_degree" not in self.settings and any(weft.allgather(has and chosen))
        if has and (chosen or not some):
            assert gradient is not None
            gradient.fill_(bad)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.local_named_parameters():
            if parameter.grad is not None:
                yield name.removeprefix("module."), local_part(parameter.grad)

    def resume(self, settings: Mapping[str, Any]) -> None:
        made = tempfile.mkdtemp(prefix="weft-between-") if weft.rank() == 0 else ""
        self.folders.append(weft.allgather(made)[0])
        weft.save_checkpoint(self.folders[-1], "a", model=self.model, optimizer=self.optimizers)
        weft.shutdown()
        super().resume(settings)
        weft.init({**settings, **self.more})
        self.build()
        weft.resume_from_checkpoint(self.folders[-1], "a")

    def close(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
