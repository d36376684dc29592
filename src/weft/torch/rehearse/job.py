"""The session of a rehearsal: the first training step is planned, and the next one ends the script."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config import Settings
from weft.launch.discovery import Place
from weft.launch.rehearsal import Asked
from weft.machines.host import Machines
from weft.machines.machine_file import parse_machines
from weft.plan.chosen import Chosen
from weft.session.travel import Travel
from weft.topology.mesh import Mesh
from weft.torch.agreement import Agreement
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.output import collect
from weft.torch.rehearse.answer import DOES_NOT_FIT, FITS, Answer
from weft.torch.rehearse.estimate import estimate
from weft.torch.rehearse.fakes import begin_group
from weft.torch.rehearse.rates import DeviceRates
from weft.torch.session import current
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.torch.session.session import Session
from weft.torch.split.link_speed import MeasuredLink
from weft.torch.split.partition_models import cut_by_decided_number, make_plan
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.tensors.pytree import map_tensors
from weft.transport.loopback import connect
from weft.watch.monitor import Limits, Monitor

log = logging.getLogger("weft")


def enter(asked: Asked, resolve: Callable[[int], Settings], alike: Callable[[Settings], bool]) -> None:
    """This process is rank 0 of the job from now on. ``resolve``: the settings for so many ranks."""
    machines = parse_machines(asked.cluster)
    settings = resolve(asked.ranks)
    mesh = Mesh(
        asked.ranks, settings.partitions, settings.tp_size, settings.placement_strategy, alike=alike(settings)
    )
    if not dist.is_initialized():
        begin_group(asked.ranks)
    here = torch.device("cpu")
    streams = Streams(here)
    place = Place(0, asked.ranks, 0, min(asked.ranks, machines.host.accelerators))
    monitor = Monitor.start(Place(), Limits(settings.heartbeat_timeout, settings.wait_timeout))
    session = Session(
        settings=settings, place=place, mesh=mesh, monitor=monitor, store=dist.HashStore(), device=here, groups={},
        streams=streams, travel=Travel(in_microbatch, is_remote=lambda tensor: False),
    )  # fmt: skip
    nobody: Any = connect(1)[0]
    session.pipeline = Pipeline(0, mesh.pp, here, nobody, streams, replicas=mesh.rdp)
    session.rehearsal = Rehearsal(asked, machines)
    session.agreement = Agreement(session)
    current.enter(session)


class Rehearsal:
    """A script that is rehearsed, and what is known of it so far.

    Attributes:
        rates: Of the device that is rehearsed.
        link: Between ranks that are neighbours in a pipeline.
        result: What the traced step has returned, without values.
        ended: Whether the answer was printed.
        states: The bytes that an optimizer keeps for each parameter, by the parameter's id.
        at_once: Whether the optimizers update all weights in a few operations.
    """

    def __init__(self, asked: Asked, machines: Machines) -> None:
        self.asked, self.machines = asked, machines
        self.rates = DeviceRates(machines.host.accelerator)
        inside = machines.host.inside
        self.link = MeasuredLink(inside.latency_s, inside.bytes_per_s)
        self.result: Any = None
        self.states: dict[int, int] = {}
        self.at_once = True
        self.ended = False
        self._found: Answer | None = None
        self._began_s = time.monotonic()

    def step(self, session: Session, function: Callable[..., Any], batch: MiniBatch, counted: bool) -> Any:
        """The result of a step, all zeros; the step after one that trains ends the rehearsal."""
        if self._found is not None and self._found.trains:
            self.end(session)
        if session.settings.microbatches == "auto":
            batch = cut_by_decided_number(session, list(session.models), function, batch, self.link)
        plans = []
        for model in session.models:
            plan = make_plan(session, model, function, batch, self.link, counted)
            if plan.chosen is not None:
                session.decided.use_schedule(Chosen.from_record(plan.chosen))
            model.plan, model.owners = plan, plan.owners(model.module)
            if session.settings.optimize == "auto" and plan.optimize:
                session.decide(optimize=plan.optimize, memory_weight=plan.memory_weight)
            plans.append((model, plan))
        self._found = estimate(session, self.machines, plans)
        zeros = map_tensors(self.result, lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape))
        results = [zeros] * batch.microbatches
        return collect(results, batch.weights())

    def update(self, optimizer: Any) -> None:
        """An optimizer steps: what it keeps for a weight is measured, once for each shape."""
        known: dict[Any, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            self.at_once = group.get("foreach", False) is not False and not group.get("fused")
            for weight in group["params"]:
                key = number, weight.shape, weight.dtype
                if weight.requires_grad and key not in known:
                    known[key] = _kept_bytes(optimizer, group, weight)
                self.states[id(weight)] = known.get(key, 0) if weight.requires_grad else 0

    def end(self, session: Session) -> None:
        """Say what was found, and end the script."""
        if self._found is None:
            print(
                "weft rehearse: the script ended before its first step (@weft.step)",
                file=sys.stderr,
            )
            raise SystemExit(2)
        self.ended, found = True, self._found.with_states(self.states, self.at_once)
        print(found.text(time.monotonic() - self._began_s), flush=True)
        if self.asked.json:
            Path(self.asked.json).write_text(found.to_json() + "\n")
        raise SystemExit(FITS if found.fits else DOES_NOT_FIT)


def _kept_bytes(optimizer: Any, group: Mapping[str, Any], weight: Tensor) -> int:
    """The bytes that an optimizer keeps for a weight after a step; on the CPU if it reads values."""
    options = {name: value for name, value in group.items() if name != "params"}
    for device in ("meta", "cpu"):
        twin = nn.Parameter(torch.zeros_like(weight, device=device))
        twin.grad = torch.zeros_like(twin)
        try:
            alone = type(optimizer)([{**options, "params": [twin]}])
            alone.step()
        except Exception as error:  # whatever an optimizer of somebody's own may raise
            log.debug("%s on the %s: %s", type(optimizer).__name__, device, error)
            continue
        return sum(each.nbytes for each in alone.state[twin].values() if isinstance(each, Tensor))
    log.warning("what %s keeps is not known: two numbers a weight are counted", type(optimizer).__name__)
    return 2 * weight.nbytes
