"""`"microbatches": "auto"`: what trains is what the same number by hand trains, whichever is taken."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

import weft.torch as weft
from weft.errors import UsageError
from weft.plan.measured.microbatches import Judged
from weft.torch.session.current import session
from weft.torch.split import microbatch_number

from ..split import train_split
from .harness import assert_same, check, seeded, sgd, squared_error, start, trained_alone, vectors
from .inputs import chain, plain, refused, uneven
from .modules import OPPOSITE, normalised

ROWS = 24


@contextmanager
def taking(number: int) -> Iterator[list[Sequence[Judged]]]:
    """Inside, this number is the quickest; the value has what there was to choose from."""
    seen: list[Sequence[Judged]] = []

    def quickest(found: Sequence[Judged]) -> Judged:
        seen.append(found)
        return next(one for one in found if one.microbatches == number)

    with patch.object(microbatch_number, "quickest", quickest):
        yield seen


@check
def decided_number_is_the_number_by_hand() -> list[int]:
    """Batch statistics follow the number, so that another one would show."""
    batches, taken = vectors(rows=ROWS), []
    for number in (2, 6):
        net = seeded(normalised)
        expected = trained_alone(net, batches, microbatches=number)
        for places in (None, OPPOSITE):
            by_hand = {} if places is None else {"auto_partition": False, "default_partition": 0}
            start("auto", **by_hand)
            with taking(number):
                actual = train_split(copy.deepcopy(net), batches, squared_error, sgd, places=places)
            assert_same(actual, expected)
            taken.append(session().settings.microbatch_count)
    assert taken == [2, 2, 6, 6]
    return taken


@check
def decided_number_for_every_kind_of_schedule() -> list[int]:
    batches, taken = vectors(rows=ROWS), []
    for pipeline in ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "list", "auto"):
        net = seeded(normalised)
        start("auto", pipeline=pipeline)
        actual = train_split(copy.deepcopy(net), batches, squared_error, sgd)
        number = session().settings.microbatch_count
        assert_same(actual, trained_alone(net, batches, microbatches=number))
        assert ROWS % number == 0
        taken.append(number)
    return taken


@check
def decided_number_stays() -> list[str]:
    """Batches of other sizes are treated as with the number by hand; so is a model that is split already."""
    model, _ = chain(microbatches="auto")
    x = vectors(rows=ROWS)[0]["x"]
    with taking(6) as seen:
        plain(model, x)
    assert len(seen) == (session().rank == 0)
    assert "microbatches: 6 of 4 samples" in str(weft.partition_report())
    assert all([one.microbatches for one in found] == [1, 2, 3, 6, 12, 24] for found in seen)
    first = plain(model, x[:18])
    start("auto")
    again = plain(model, x[:18])
    assert len(first.outputs) == len(again.outputs) == 6
    train = weft.step(lambda model, x, y: model.backward(((model(x) - y) ** 2).mean()))
    train(model, x, x)
    return [refused(train, model, x[:8], x[:8], words=["8 samples, which 6 microbatches do not divide"])]


@check
def decided_number_of_uneven_batches() -> None:
    model, alone = chain(microbatches="auto")
    batch = vectors(rows=7)[0]
    with taking(5):
        loss = uneven(model, batch["x"], batch["y"])
    assert len(loss.outputs) == 5
    assert abs(loss.reduce_mean().item() - squared_error(alone, batch).item()) < 1e-5


@check
def number_cannot_be_decided_without_what_is_cut() -> str:
    start("auto")
    model = weft.DistributedModel(seeded(nn.Linear, 4, 4))
    x = vectors(4)[0]["x"]

    @weft.step(non_split_inputs=["x"])
    def whole(model: nn.Module, x: object) -> object:
        return model(x)

    try:
        whole(model, x)
    except UsageError as error:
        assert "write a number" in str(error), error
        return str(error)
    raise AssertionError("it was not refused")


@check
def decided_number_is_resumed() -> None:
    with TemporaryDirectory() as folder:
        told = [folder if session().rank == 0 else ""]
        dist.broadcast_object_list(told)
        root, batches = Path(told[0]), vectors(rows=ROWS)
        start("auto")
        model = weft.DistributedModel(seeded(normalised))
        with taking(6):
            plain(model, batches[0]["x"])
        weft.save_checkpoint(root, "t", model=model)
        start("auto")
        again = weft.DistributedModel(seeded(normalised))
        weft.resume_from_checkpoint(root, model=again)
        assert again.resumed_plan is not None
        with taking(2) as seen:
            plain(again, batches[0]["x"])
        assert not seen and session().settings.microbatch_count == 6
        assert again.plan.units == model.plan.units
        dist.barrier()
