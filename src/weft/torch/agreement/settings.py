"""Rates, loss scales and loads, as each rank sends them at the beginning of a step."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft.errors import DivergenceError
from weft.launch.startup import first_difference
from weft.session.step_check import SETTINGS_ADVICE, refuse_differing
from weft.torch.agreement.written import Written
from weft.torch.session.collectives import gather_texts
from weft.torch.session.session import Session
from weft.torch.tensors.marks import CUT


class Agreement:
    """This rank's settings, loads and weights that all ranks must have alike.

    Attributes:
        begun: Whether the ranks have had a step in common, before which everybody got what the first rank had.
    """

    def __init__(self, session: Session) -> None:
        self.begun = False
        self._session = session
        self._known: dict[str, list[weakref.ref[Any]]] = {"model": [], "optimizer": [], "scaler": []}
        self._loads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._written = Written()
        self._inside = False
        self._at_begin: tuple[str, dict[str, str]] | None = None
        self._outlines: set[weakref.ref[Any]] = set()
        self._described: list[_Described] = []
        """The settings of which :attr:`_text` was made."""
        self._text = "{}"
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._weights: weakref.WeakKeyDictionary[Any, dict[str, Tensor]] = weakref.WeakKeyDictionary()

    # --- what there is --------------------------------------------------------------------------------------

    def add_model(self, model: Any) -> None:
        """Know one more ``DistributedModel``, as long as it exists."""
        self._known["model"].append(weakref.ref(model))

    def add_optimizer(self, optimizer: Any) -> None:
        """Know one more ``DistributedOptimizer``, as long as it exists."""
        self._known["optimizer"].append(weakref.ref(optimizer))
        known = weakref.ref(self)

        def loaded(loading: Optimizer) -> None:
            present = known()
            if present is not None:
                present.note_load(loading)

        optimizer.optimizer.register_load_state_dict_post_hook(loaded)

    def add_scaler(self, scaler: Any) -> None:
        """Know one more gradient scaler, as long as it exists."""
        self._known["scaler"].append(weakref.ref(scaler))

    def note_load(self, target: Any) -> None:
        """The script has loaded a state into a model or an optimizer."""
        self._loads[target] = self._loads.get(target, 0) + 1

    def present(self, kind: str) -> dict[str, Any]:
        """The living objects of a kind ("model", "optimizer" or "scaler"), by names that are the same on every rank."""
        several = len(self._known[kind]) > 1
        present = [(number, each()) for number, each in enumerate(self._known[kind])]
        return {f"{kind} {number}" if several else kind: each for number, each in present if each is not None}

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that exist, in the order of their making."""
        return list(self.present("optimizer").values())

    # --- what is sent ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Find out, before a step, what this rank has."""
        self._at_begin = self._find()

    def end_step(self) -> None:
        """A step has ended, and has written what it writes."""
        self._at_begin = None
        outlines = {weakref.ref(each.outline) for each in self._session.models if each.outline is not None}
        if outlines != self._outlines:  # models are new, or were split or changed in this step
            self._outlines = outlines
            self._written.begin_anew(weight for weights in self._watched() for weight in weights.values())

    @contextmanager
    def stepping(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Inside, an optimizer writes these, and nothing else does."""
        self._written.look(weights)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._written.note(weights)

    def settings(self) -> str:
        """Rates, scales and numbers of loads by the names that errors use, as JSON; all ranks have the same."""
        return self._find_settings() if self._at_begin is None else self._at_begin[0]

    def to_compare(self, cut: bool = True) -> str:
        """:meth:`settings` and digests of the weights that the script wrote, as JSON.

        Ranks with the same weights have the same text.

        ``cut``: whether they have the same parts of weights that are cut, too.
        """
        settings, weights = self._find() if self._at_begin is None else self._at_begin
        if weights and not cut:
            parts = {
                name for each in self._watched() for name, w in each.items() if getattr(w, CUT) is not None
            }
            weights = {**weights, **dict.fromkeys(parts & weights.keys(), "a part")}
        return f"[{settings}, {json.dumps(weights)}]"

    def compare(self, ranks: Sequence[int], texts: Sequence[str]) -> None:
        """Compare the texts that ranks got from :meth:`to_compare`; an empty one does not count.

        Raises:
            DivergenceError: They differ.
        """
        states = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True) if text}
        refuse_differing(self._session.steps, {rank: settings for rank, (settings, _) in states.items()})
        weights = {rank: each for rank, (_, each) in states.items()}
        difference = first_difference(weights).partition(": ")[2]
        if difference:
            raise DivergenceError(
                f"in step {self._session.steps} the ranks have other weights, which the script wrote between steps "
                f"(a digest of {difference}; missing: not written there){SETTINGS_ADVICE}"
            )

    def compare_replicas(self, text: str) -> None:
        """Compare what the replicas have; collective over them. ``text``: that of :meth:`to_compare` here, or empty."""
        self.compare(self._session.peers("rdp"), gather_texts(text, self._session.group("rdp")))

    def _find(self) -> tuple[str, dict[str, str]]:
        return self._find_settings(), self._find_written()

    def _find_settings(self) -> str:
        if self._session.place.world_size == 1 and self._session.rejoin is None:
            return "{}"
        described = [*self._describe()]
        if described != self._described:
            self._described = described
            self._text = json.dumps(
                {f"{key} {of}": text for of, values in described for key, text in _texts(values)}
            )
        return self._text

    def _watched(self) -> Iterator[dict[str, Tensor]]:
        """The weights that other ranks have as this one, by names of their own; of one model after the other."""
        if self._session.mesh.rdp * self._session.mesh.tp == 1:
            return
        for which, model in self.present("model").items():
            of = "" if which == "model" else f" of the {which}"  # an average has the names of its model
            outline = model.outline
            whole = not model.sharded and model.shared is None
            if outline is not None and whole:
                if outline not in self._weights:
                    named = outline.parameters.items()
                    self._weights[outline] = {
                        f"{name}{of}": weight
                        for name, weight in named
                        if model.is_local(name) and not (model.experts and model.experts.has(weight))
                    }
                yield self._weights[outline]

    def _find_written(self) -> dict[str, str]:
        """Digests of the weights that the script has written and an optimizer trains; not those of averages."""
        found = self._written.take(self._watched())
        if not found:
            return {}
        steps = [*self.optimizers, *self._stepped]
        trained = {id(w) for each in steps for group in each.param_groups for w in group["params"]}
        trained |= {id(weight) for each in self.optimizers for weight in each.weights()}
        return self._written.digests({name: w for name, w in found.items() if id(w) in trained})

    def _describe(self) -> Iterator[_Described]:
        """The objects and their settings; texts of them are made only when one has changed."""
        loaded = "the number of states loaded into"
        for name, model in self.present("model").items():
            yield f"the {name}", [(loaded, self._loads.get(model, 0))]
        for name, optimizer in self.present("optimizer").items():
            groups = optimizer.param_groups
            yield f"the {name}", [(loaded, self._loads.get(optimizer.optimizer, 0))]
            yield f"of the {name}", [("the number of groups", len(groups))]
            for place, group in enumerate(groups):
                here = f"of group {place} of the {name}" if len(groups) > 1 else f"of the {name}"
                # Adafactor makes a rate of its own for each weight
                without = ("params", "lr") if group.get("relative_step") else ("params",)
                yield here, [(key, _value(value)) for key, value in group.items() if key not in without]
            scaler = getattr(optimizer, "loss_scaler", None)
            if scaler is not None:
                yield f"of the {name}", [("the loss scale", scaler.loss_scale)]
        for name, scaler in self.present("scaler").items():
            if scaler.is_enabled():
                yield f"of the {name}", [("the scale", scaler.scale_as_set())]

    def forget_loads(self) -> None:
        """All ranks have the same now."""
        self._loads.clear()

    # --- optimizers that step -------------------------------------------------------------------------------

    def watch_optimizers(self) -> None:
        """From now on what an optimizer's step writes is not taken for written by the script."""
        session = self._session
        if session.mesh.rdp * session.mesh.tp == 1:
            return

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._stepped.add(optimizer)
            if not self._inside:
                self._written.look(_weights_of(optimizer))

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self._inside:
                self._written.note(_weights_of(optimizer))

        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def close(self) -> None:
        """The session ends."""
        for hook in self._hooks:
            hook.remove()


def _weights_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_Described = tuple[str, list[tuple[str, Any]]]
"""An object, as errors call it, and its settings."""


def _value(setting: Any) -> Any:
    """A setting whose later changes are not seen: a number in the place of a tensor."""
    if isinstance(setting, Tensor):
        return setting.item() if setting.numel() == 1 else None
    return tuple(setting) if isinstance(setting, list) else setting


def _texts(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Settings as texts; without those that cannot be compared between processes, such as functions."""
    for key, value in values:
        text = _plain(value)
        if text:
            yield key, text


def _plain(value: Any) -> str:
    """A setting as text; empty if it cannot be compared between processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, tuple):
        parts = [_plain(_value(each)) for each in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return ""
