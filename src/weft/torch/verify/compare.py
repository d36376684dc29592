"""The proof at the first step: what the split step gives is compared with what one process gives.

    before the step   the first rank runs all microbatches alone (see ``reference``), while the others wait
    in the step       ranks take fingerprints of what their units get and return, and of what backward passes begin at
    after it          the first rank compares: what the step returns, the tensors given to backward, buffers,
                      and gradients if that is wanted

A difference is an error on every rank, before gradients are averaged and any weight changes. Afterwards nothing of the
comparison is left, and no later step costs anything.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from weft.errors import VerifyError
from weft.torch.delayed_parameters import has_delayed
from weft.torch.execution.unit_call import UnitCall
from weft.torch.placed.plan import is_below
from weft.torch.replicas.sync_batch_norm import SyncBatchNorm
from weft.torch.session.collectives import agree_on, gather_texts
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensors.mini_batch import MiniBatch
from weft.torch.verify.findings import Findings, compare
from weft.torch.verify.fingerprint import Fingerprint, Sketch, fingerprint, fingerprints, sketches
from weft.torch.verify.lender import Lender
from weft.torch.verify.reference import (
    OneProcess,
    Reference,
    borrow,
    buffers_of,
    gradients_of,
    of_gradient,
    units_of,
)
from weft.units import format_bytes

log = logging.getLogger("weft")

WHAT = "the comparison with one process"
TOLD_BYTES = 8 << 30
"""From so many bytes of weights on, that travel to be compared, the first rank says that it takes a while."""
STEPS = 3
"""How many steps ``weft verify`` compares."""


def reason_against(session: Session, models: Sequence[Any]) -> str:
    """Why the first step of these models, which are about to be split, cannot be compared; empty if it can be."""
    if any(model.resumed_plan is not None for model in models):
        return "the model was resumed, and what its modules hold besides tensors may be on other ranks"
    if session.mesh.rdp > 1 and any(
        isinstance(m, SyncBatchNorm) for one in models for m in one.module.modules()
    ):
        return "SyncBatchNorm takes the samples of all replicas together"
    if session.weights_device != session.device and needs_parts(models):
        return "its weights wait in host memory, and the device may have no room for them"
    return ""


def needs_parts(models: Sequence[Any]) -> bool:
    """True if no rank holds all of these models, which are about to be split: then they run by unit."""
    return any(model.oversized or has_delayed(model.module) for model in models)


def begin(
    session: Session, models: Sequence[Any], function: Callable[..., Any], batch: MiniBatch
) -> Proof | None:
    """The proof that watches the step, which has to follow; None if the step is not compared.

    The reference runs in here. Collective over all ranks. ``models``: the models that have just been split.
    """
    settings = session.settings
    if settings.verify_report and session.steps < STEPS:
        models = session.proofs.models = models or session.proofs.models
    if session.pipeline is None or not models:
        return None
    if settings.verify == "off":
        session.views.opening.proof = "verify is off"
        return None
    started = time.perf_counter()
    proof, reason = Proof(session, models), session.proofs.unproved
    if any(model.cut for model in models):
        reason = reason or "weights are cut over ranks, so that no rank holds all of them"
    if session.proofs.by_unit and any(
        model.plan.tensors or model.plan.sequences or model.plan.experts for model in models
    ):
        reason = reason or "no rank holds all of the model, and ranks share the work of a layer"
    if not reason:
        for model in models:
            if model.reducer is not None:
                model.reducer.wait_for_the_end()
        values = borrow(session, models, session.proofs.by_unit) if proof.takes_part else {}
        lender = Lender(session, models) if proof.takes_part and session.proofs.by_unit else None
        if lender is not None and session.rank:
            lender.serve()
        elif lender is not None and lender.nbytes > TOLD_BYTES:
            log.warning(
                "the first microbatch is compared with one process: %s of weights come to the first rank twice, module "
                'by module ("verify": "off" leaves it out)', format_bytes(lender.nbytes),
            )  # fmt: skip
        reason = agree_on(session, lambda: proof.run(function, batch, values, lender), WHAT).strip()
    if reason:
        proof.report({"reason": reason})
        if session.rank == 0:
            found = f"step {session.steps + 1} was not compared with one process: {reason}"
            session.views.opening.proof = found
            log.info("verify: %s", found)
        return None
    proof.attach()
    proof.seconds = time.perf_counter() - started
    return proof


def end(session: Session) -> None:
    """End the job after the steps that ``weft verify`` wants."""
    if session.settings.verify_report and session.steps >= STEPS:
        raise SystemExit(0)


class Recorded:
    """A recorder in place of a unit's code in a step that is compared: it notes what the unit gets and what it
    returns."""

    def __init__(self, proof: Proof, name: str, call: UnitCall) -> None:
        self.proof = proof
        self.name = name
        self.inner = call.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self.proof.session.pipeline
        microbatch = None if pipeline is None else pipeline.drawing
        if microbatch is None or microbatch.index in self.proof.back:  # a checkpoint runs it again
            return self.inner(*args, **kwargs)
        calls, index = self.proof.calls, microbatch.index
        number = calls[index, self.name] = calls.get((index, self.name), 0) + 1
        given = sketches((args, kwargs))
        result = self.inner(*args, **kwargs)
        self.proof.units[index, self.name, number] = given, sketches(result)
        return result


class Proof:
    """One step that is compared. ``takes_part``: this rank belongs to the pipeline whose first rank decides; ``helps``:
    it holds at least parts of weights of that one."""

    def __init__(self, session: Session, models: Sequence[Any]) -> None:
        self.session = session
        self.models = models
        self.takes_part = 0 in session.peers("pp")
        self.helps = 0 in session.peers("mp")
        self.seconds = 0.0
        self.calls: dict[tuple[int, str], int] = {}
        self.units: dict[tuple[int, str, int], tuple[list[Sketch], list[Sketch]]] = {}
        self.given: dict[int, list[Fingerprint | None]] = {}
        self.back: set[int] = set()
        self._reference = Reference()
        self._recorded: list[tuple[UnitCall, Recorded]] = []
        self._before: dict[str, Fingerprint | None] = {}

    # --- before the step ----------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], batch: MiniBatch, values: dict[int, list[Tensor]], lender: Lender | None
    ) -> str:  # fmt: skip
        """Run the reference, on the first rank. Why there is no reference; empty if there is one."""
        session = self.session
        states = session.streams.capture()
        seed = session.streams.draw()
        session.streams.restore(states)
        try:
            one = OneProcess(session, self.models, function, batch, seed, values, lender)
            self._reference = one.reference()
        except Exception as error:
            return f"run by one process, it raises {type(error).__name__}: {error}"
        finally:
            if lender is not None:
                lender.close()
        return self._chance()

    def _chance(self) -> str:
        """Why random numbers keep the step from being compared; empty if they do not."""
        tokens = self.session.settings.sequence_parallel and any(m.plan.tensors for m in self.models)
        if tokens and self._reference.drew:
            return (
                f"{min(self._reference.drew) or 'the model'} draws random numbers, and with sequence_parallel ranks "
                "draw others than one process"
            )
        for model in self.models:
            regions = [region["name"] for region in (model.plan.tensors or {"regions": ()})["regions"]]
            regions += (model.plan.sequences or {"regions": ()})["regions"]
            if model.plan.experts is not None:
                regions += Splits.from_record(model.plan.experts).drawing()
            for region in regions:
                for name in self._reference.drew:
                    if is_below(region, name) or region == name:
                        return (
                            f"{name or 'the model'} draws random numbers, and ranks that compute parts of it draw "
                            "others than one process"
                        )
        return ""

    def attach(self) -> None:
        """Begin to note what this rank does in the step."""
        session = self.session
        if not self.helps or session.pipeline is None:
            return
        if session.settings.verify == "gradients":
            self._before = gradients_of(self.models, local=True)
        session.pipeline.proof = (
            self  # also where it only helps: what this rank has a part of is gathered from it
        )
        for name, call, partition in units_of(self.models):
            if partition == session.pipeline.rank:
                self._recorded.append((call, Recorded(self, name, call)))
                call.inner = self._recorded[-1][1]

    # --- in the step --------------------------------------------------------------------------------------

    def begins_at(self, program: Any, tensors: Any) -> None:
        """Note that a backward pass begins at these tensors."""
        noted = self.given.setdefault(program.microbatch.index, [])
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            value = program.value_of(tensor)
            if value is not None and value.owner != program.rank:
                noted.append(None)
            else:
                noted.append(fingerprint(tensor if value is None else value.data(tensor)))

    @contextmanager
    def going_back(self, program: Any) -> Iterator[None]:
        """Inside, a backward pass of the microbatch runs."""
        self.back.add(program.microbatch.index)
        try:
            yield
        finally:
            self.back.discard(program.microbatch.index)

    # --- after the step -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Stop noting: the step is over."""
        if self.session.pipeline is not None:
            self.session.pipeline.proof = None
        for call, recorded in self._recorded:
            call.inner = recorded.inner
        self._recorded.clear()

    def conclude(self, results: Sequence[Any]) -> None:
        """Compare, once all microbatches have run; collective.

        Raises:
            VerifyError: Something differs.
        """
        self.detach()
        started = time.perf_counter()
        with self.session.doing(WHAT):
            content = self._content() if self.helps else ""
            texts = gather_texts(content, self.session.group("pp")) if self.takes_part else []
        agree_on(self.session, lambda: self._verdict(texts, results, started), WHAT)

    def _content(self) -> str:
        """The values of this rank that the first rank compares, as JSON."""
        session = self.session
        content: dict[str, Any] = {
            "units": [
                [*key, *([one.read().to_list() for one in each] for each in both)]
                for key, both in self.units.items()
            ],
            "given": [[index, _as_json(noted)] for index, noted in self.given.items()],
            "buffers": _named_as_json(buffers_of(self.models, local=True)),
            "gradients": {},
        }
        if session.settings.verify == "gradients":
            content["gradients"] = _named_as_json(
                {
                    name: grad
                    if (before := self._before.get(name)) is None or grad is None
                    else grad.less(before)
                    for name, grad in gradients_of(self.models, local=True).items()
                }
            )
        return json.dumps(content)

    def _verdict(self, texts: Sequence[str], results: Sequence[Any], started: float) -> str:
        session, reference = self.session, self._reference
        split = merge([json.loads(text) for text in texts], [fingerprints(result) for result in results])
        split.whole = session.settings.verify == "gradients"
        split.outside = [(leaf, before, of_gradient(leaf.grad)) for leaf, before, _ in reference.outside]
        places = {name: partition for name, _, partition in units_of(self.models)}
        found = compare(reference, split, self._precision(), places)
        self.seconds += time.perf_counter() - started
        self._conclude(found)
        return ""

    def _precision(self) -> torch.dtype:
        """The least precise type that the step computes in."""
        kinds = {p.dtype for model in self.models for p in model.module.parameters()}
        kinds |= self._reference.dtypes
        return max((kind for kind in kinds if kind.is_floating_point), key=lambda kind: torch.finfo(kind).eps,
                   default=torch.float32)  # fmt: skip

    def report(self, row: dict[str, Any]) -> None:
        """Write a line for ``weft verify``."""
        session = self.session
        if session.settings.verify_report and session.rank == 0:
            content = {"step": session.steps, "settings": asdict(session.settings), **row}
            with open(session.settings.verify_report, "a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")

    def _conclude(self, found: Findings) -> None:
        step = self.session.steps
        self.report({"fault": found.fault, "losses": found.losses, "gradients": found.gradients})
        part = f"'s first microbatch of {len(self.given)}" if self.session.proofs.by_unit else ""
        if self.session.proofs.by_unit and self.session.settings.verify == "gradients":
            found.proved += " (not its gradients: no rank holds all of the model)"
        self.session.views.opening.proof = f"step {step}{part} {found.verdict} ({self.seconds:.2f} s)"
        if found.fault and self.session.asked:
            log.warning(
                "verify: step %d gives other numbers than one process, perhaps because the script asks "
                "weft.is_tracing(), which is true while that runs: %s", step, found.fault,
            )  # fmt: skip
        elif found.fault and not self.session.settings.verify_report:
            raise VerifyError(f"in step {step} {found.fault}")
        elif not found.fault:
            if found.unsteady:
                log.warning(
                    "verify: tensor %s of those that the step returns differs whenever one process runs it twice (a "
                    "time, perhaps), so it is not compared", ", ".join(map(str, sorted(found.unsteady))),
                )  # fmt: skip
            log.info("verify: step %d gives %s; this took %.2f s", step, found.proved, self.seconds)


def merge(contents: Sequence[Any], returned: list[list[Fingerprint]]) -> Reference:
    """One reference from what the ranks of a pipeline have noted of a step."""
    buffers: dict[str, Fingerprint | None] = {}
    split = Reference(returned, [[] for _ in returned], [{} for _ in returned], buffers=buffers)
    for content in contents:
        for index, name, number, given, result in content["units"]:
            split.units[index][name, number] = _prints(given), _prints(result)
        for index, noted in content["given"]:
            known = split.given[index] or [None] * len(noted)
            split.given[index] = [a or _print(b) for a, b in zip(known, noted, strict=False)]
        buffers |= {name: _print(one) for name, one in content["buffers"].items()}
        split.gradients |= {name: _print(one) for name, one in content["gradients"].items()}
    return split


def _as_json(prints: Sequence[Fingerprint | None]) -> list[Any]:
    return [None if one is None else one.to_list() for one in prints]


def _named_as_json(prints: dict[str, Fingerprint | None]) -> dict[str, Any]:
    return {name: None if one is None else one.to_list() for name, one in prints.items()}


def _print(content: Any) -> Fingerprint | None:
    return None if content is None else Fingerprint.from_list(content)


def _prints(content: list[Any]) -> list[Fingerprint]:
    return [Fingerprint.from_list(one) for one in content]
