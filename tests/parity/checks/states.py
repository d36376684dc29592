"""States that are loaded into a model under other names, or into one with more or fewer parts."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.training import step_of
from weft.errors import UsageError

from ..compare import on_device
from .harness import WIDTH, adamw, check, seeded, squared_error, start, vectors


class Wrapper(nn.Module):
    """Has all it does in a child called `module`, as many wrappers do."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *more
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


step = step_of(squared_error)


def made(net: nn.Module) -> tuple[Any, Any]:
    """The model, which has not been split yet, and its optimizer."""
    start()
    model = weft.DistributedModel(net)
    return model, weft.DistributedOptimizer(adamw(model.parameters()))


def train(model: Any, optimizer: Any, steps: int = 1) -> list[float]:
    losses = []
    for batch in vectors(steps=steps):
        optimizer.zero_grad()
        losses.append(step(model, batch).reduce_mean().item())
        optimizer.step()
    return losses


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder of all ranks."""
    path = weft.allgather(tempfile.mkdtemp(prefix="weft-states-") if weft.rank() == 0 else "", weft.WORLD)[0]
    try:
        yield Path(path)
    finally:
        weft.barrier()
        if weft.rank() == 0:
            shutil.rmtree(path)


@check
def a_child_called_module() -> None:
    model, optimizer = made(seeded(Wrapper))
    began = state_of(model)
    assert all(name.startswith("module.") for name in began)
    model.load_state_dict(began)
    train(model, optimizer)
    trained = state_of(model)
    for state in (began, trained, {f"module.{name}": value for name, value in trained.items()}):
        model.load_state_dict(state)
        same(state_of(model), began if state is began else trained)
    local = copy.deepcopy(model.local_state_dict())
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    model.load_state_dict(local)
    same(state_of(model), trained)
    with folder() as where:
        for partial in (True, False):
            weft.save_checkpoint(where / str(partial), "a", partial=partial, model=model)
            model.load_state_dict(began)
            weft.resume_from_checkpoint(where / str(partial), "a", partial=partial, load_optimizer=False)
            same(state_of(model), trained)


@check
def the_same_is_told_before_and_after_the_split() -> None:
    net = seeded(Wrapper)
    alone = copy.deepcopy(net)
    given = dict(alone.state_dict())
    del given["module.0.bias"]
    given["another"] = torch.zeros(3)
    expected = alone.load_state_dict(given, strict=False)
    model, optimizer = made(net)
    for _ in range(2):
        told = model.load_state_dict(given, strict=False)
        assert (told.missing_keys, told.unexpected_keys) == (expected.missing_keys, expected.unexpected_keys)
        with pytest.raises(UsageError, match=r"module\.0\.bias is missing.*another is not part of the model"):
            model.load_state_dict(given)
        assert model.load_state_dict(alone.state_dict()) == alone.load_state_dict(alone.state_dict())
        train(model, optimizer)


@check
def states_of_wrapped_and_compiled_models() -> None:
    plain = seeded(Wrapper).module
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    wrapped = {f"module.{name}": value for name, value in state.items()}
    compiled = {f"_orig_mod.{name}": value for name, value in state.items()}
    inside = {name.replace("2.", "2._orig_mod."): value for name, value in wrapped.items()}
    for given in (state, wrapped, compiled, inside):
        for split in (False, True):
            model, optimizer = made(seeded(Wrapper).module)
            if split:
                train(model, optimizer)
            model.load_state_dict(given)
            same(state_of(model), on_device(state))
    with folder() as where:
        for number, given in enumerate((wrapped, compiled, inside)):
            if weft.rank() == 0:
                torch.save(given, where / f"{number}.pt")
            weft.barrier()
            model, optimizer = made(seeded(Wrapper).module)
            train(model, optimizer)
            weft.resume_from_checkpoint(where / f"{number}.pt", partial=False)
            same(state_of(model), on_device(state))


@check
def a_checkpoint_whose_names_are_translated() -> None:
    model, optimizer = made(seeded(Wrapper))
    train(model, optimizer)
    trained = state_of(model)
    with folder() as where:
        if weft.rank() == 0:
            torch.save({f"body/{name}": value for name, value in trained.items()}, where / "foreign.pt")
        weft.barrier()
        model, optimizer = made(seeded(Wrapper))
        train(model, optimizer)
        with pytest.raises(UsageError, match=r"module\.0\.weight is missing"):
            weft.resume_from_checkpoint(where / "foreign.pt", partial=False)
        weft.resume_from_checkpoint(
            where / "foreign.pt", partial=False,
            translate_function=lambda found: {name.removeprefix("body/"): value for name, value in found.items()},
        )  # fmt: skip
        same(state_of(model), trained)


@check
def an_optimizer_whose_model_is_wrapped_by_now() -> list[float]:
    model, optimizer = made(seeded(Wrapper).module)
    train(model, optimizer, steps=2)
    with folder() as where:
        weft.save_checkpoint(where, "a", model=model, optimizer=optimizer)
        expected = train(model, optimizer, steps=3)
        model, optimizer = made(seeded(Wrapper))
        weft.resume_from_checkpoint(where, "a")
        found = train(model, optimizer, steps=3)
        assert found == pytest.approx(expected, rel=1e-5)
        return found


@check
def resuming_with_more_and_with_fewer_parts() -> list[float]:
    model, optimizer = made(seeded(Wrapper))
    train(model, optimizer)
    trained = state_of(model)
    losses = []
    with folder() as where:
        weft.save_checkpoint(where, "a", model=model, optimizer=optimizer)
        for more, gone in ((nn.Linear(WIDTH, WIDTH), 0), (nn.BatchNorm1d(WIDTH, affine=False), 0), (nn.Tanh(), 0),
                           (None, 1)):  # fmt: skip
            net = seeded(Wrapper, *([copy.deepcopy(more)] if more is not None else []))
            if gone:
                del net.module[-1]
            alone = copy.deepcopy(net)
            alone.load_state_dict(trained, strict=False)
            model, optimizer = made(net)
            if next(iter(more.parameters() if more is not None else ()), None) is not None:
                with pytest.raises(UsageError, match="load_optimizer=False"):
                    weft.resume_from_checkpoint(where, "a", strict=False)
            weft.resume_from_checkpoint(where, "a", strict=False, load_optimizer=False)
            losses += train(model, optimizer)
            batch = vectors(steps=1)[0]
            parts = [{name: rows.chunk(4)[n] for name, rows in batch.items()} for n in range(4)]
            expected = sum(squared_error(alone.train(), part).item() for part in parts) / 4
            assert losses[-1] == pytest.approx(expected, rel=1e-5), (more, losses[-1], expected)
    return losses
