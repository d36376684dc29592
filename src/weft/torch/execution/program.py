"""One microbatch's program on one rank: operations and unit calls on placed tensors.

Every rank of the pipeline runs the same program, so numbers given in order agree, and each
rank knows from these alone who runs a call, who must send and who must receive. A call goes:

    1  find the placed tensors among its arguments, and the rank that runs it
    2  that rank: make its arguments local (receive, or enter the segment), run, give the results places
    3  others: send what they own of its arguments, and make placeholders for its results

Both rank sets need the call's ``Spec``; see ``calls.call_signature``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.communication.messages import decode, encode
from weft.errors import DivergenceError, UsageError
from weft.runtime.microbatch import Microbatch
from weft.torch.backward.autograd import check_outside
from weft.torch.calls.call_signature import Spec, Watch, describe_result, digest, meta_from, shapes_in
from weft.torch.calls.container_writes import Change, Filled, puts_the_same
from weft.torch.calls.placeholders import mark_left
from weft.torch.execution.in_place import Aliases
from weft.torch.execution.replicated import EVERYWHERE
from weft.torch.execution.tape import Tape, check_stale
from weft.torch.execution.value import Alias, PlacedTensors, Value
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, call_seed, mix, same_states
from weft.torch.tensors.deferred_logits import settled
from weft.torch.tensors.description import build
from weft.torch.tensors.marks import unwritten
from weft.torch.tensors.pytree import map_tensors, tensors_in
from weft.transport.channel import READ, SHAPES, SPEC, Key, Message

Signature = tuple[Any, ...]
"""What is called, with which shapes, dtypes and settings; the same on every rank."""
Localise = Callable[[Any, Callable[[Tensor], Tensor]], Any]
"""The inputs of a call with their tensors passed through a function."""


class Program:
    """See the module.

    ``seed``: this step's; ``scale``: what the microbatch's loss weighs in the whole; ``splits``: see :class:`Tape`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        microbatch: Microbatch,
        step: int,
        seed: int,
        scale: float,
        splits: frozenset[int] = frozenset(),
    ) -> None:
        self.pipeline = pipeline
        self.rank = pipeline.rank
        self.microbatch = microbatch
        self.step = step
        self.seed = seed
        self.scale = scale
        self.tape = Tape(pipeline, microbatch, step, splits)
        self.placed = PlacedTensors(pipeline, self.tape.segments, microbatch.index)
        self.value_of: Callable[[Tensor], Value | None] = self.placed.value_of
        """Bound once, because glue asks it for every tensor."""
        self.aliases = Aliases(self.placed, self.tape)
        self.module = ""
        self.checkpointing = False
        self.left: dict[int, int] = {}
        """The numbers of the values that units have put into lists, dicts and objects, and the serials of the units;
        see ``calls.container_writes``."""
        self.keeps_apart: dict[int, bool] = {}
        """Of units that were given what others have left, by their serials: whether they have not written there."""
        self.drawn: dict[str, int] = {}
        """How many calls of each name have drawn random numbers, on whichever rank."""
        self.log: list[Signature] = pipeline.logs.setdefault(microbatch.index, [])
        """The signatures of its calls, in order; see ``session.differing_calls``."""

    # --- tensors --------------------------------------------------------------------------------------------

    def local(self, tensor: Tensor, value: Value) -> Tensor:
        """The tensor's data for use on this rank, now."""
        if value.owner == self.rank:
            check_stale(value, self.module)
            return self.tape.local(value, tensor)
        return self.tape.receive(self.aliases.received(tensor, value), self.module)

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        """A call on ``owner`` uses ``tensors``: note those that are replicated and need a gradient."""
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad and self.value_of(tensor) is None:
                    self.tape.need_replicated().use(tensor, owner, lambda: self.placed.new_value(EVERYWHERE))

    def send_all(self, values: list[tuple[Tensor, Value]], owner: int) -> None:
        for tensor, value in values:
            if value.owner == self.rank:
                self.tape.send(value, tensor, owner, self.module)

    def note_left(self, changes: Sequence[Change], things: Sequence[Any], unit: str, serial: int) -> None:
        """Note what a unit has put into the ``things`` that it was given.

        Raises:
            UsageError: Another microbatch that runs has put something there, so that the two see each other's half-way.
        """
        for number, _ in changes:
            thing, filled = things[number], self.pipeline.filled
            if filled.setdefault(id(thing), (thing, self.placed.batch))[1] is not self.placed.batch:
                raise UsageError(
                    f"{unit} puts something into a {type(thing).__qualname__} into which another microbatch that still "
                    "runs has put something, too: let each microbatch make one for itself"
                )
        for tensor in tensors_in(changes):
            value = self.value_of(tensor)
            if value is not None:
                self.left[value.number] = serial
                if value.owner != self.rank:
                    mark_left(tensor, unit, value.owner, self.pipeline.device)

    # --- calls ----------------------------------------------------------------------------------------------

    def spec_for(self, key: Signature, name: str, owner: int, call: int) -> Spec:
        """The result's description for calls of this signature, sent by its owner once, or each time if dynamic."""
        spec = self.pipeline.specs.get(key)
        if spec is None:
            number = digest(name, key[1:])
            message = self.microbatch.receive(
                owner, Key(SPEC, self.pipeline.generation, 0, number), f"the shapes that {name} returns"
            )
            spec = self.pipeline.specs[key] = Spec.from_text(message.text or "")
        else:  # other replicas may have other shapes, which they do not know yet
            self.microbatch.take_turns()
        if spec.random:
            self._count(name)
        if spec.dynamic:
            message = self.microbatch.receive(
                owner, self.tape.key(SHAPES, call), f"the shapes that {name} returns"
            )
            spec = Spec.from_text(message.text or "")
        if spec.random and self._is_seeded():
            message = self.microbatch.receive(
                owner, self.tape.key(READ, call), f"the random numbers of {name}"
            )
            self.pipeline.streams.take(message.text or "")
        return spec

    def enter(self, name: str) -> None:
        """A unit's code runs on this rank from now on."""
        self.module = name
        self.microbatch.worked = True
        self.pipeline.note("forward", self.step, self.microbatch.index, name)

    def next_call(self, key: Signature) -> int:
        """The number of the call of this signature."""
        self.log.append(key)
        return len(self.log)

    def run_here(
        self, key: Signature, name: str, call: int, function: Callable[[Any], Any], tensors: list[Tensor], inputs: Any,
        localise: Localise, alias: Alias | None = None,
    ) -> Any:  # fmt: skip
        """Run a call on this rank and place its results.

        ``function(inputs)`` runs it; ``localise(inputs, transform)`` passes its tensors through ``transform`` before;
        ``tensors`` are all tensors among its inputs; ``alias`` is what the results share memory with, if they are
        views.
        """
        spec = self.pipeline.specs.get(key) or self._heard(key, name)
        entered: dict[int, Tensor] = {}
        written = tensors if spec is None else [tensors[number] for number in spec.mutated]
        if alias is not None:  # a copy's view would be no view
            written = []
        aliases = self.aliases
        aliases.renewed.clear()
        transform = self._localiser(entered, {id(tensor) for tensor in written})
        local = localise(inputs, transform)
        without_grad = aliases.members_without_grad(written) if written else ()
        result, spec = self._run(key, name, function, local, inputs, tensors, transform)
        self._announce_once(key, name, spec)
        if spec.dynamic:
            description, passed = describe_result(
                result, name, inputs, [*map(transform, tensors)], self.pipeline.size > 1
            )
            spec = spec._replace(description=description, passed=passed)
        elif isinstance(result, Filled):
            self._check_filled(spec, result, name, inputs, tensors)
        if without_grad:
            aliases.note_grad(without_grad)
        if aliases.renewed and not (spec.mutated or spec.passed):
            aliases.undo_copies()
        for number in spec.mutated:
            tensor = tensors[number]
            aliases.overwrite(tensor, self.rank, entered.get(id(tensor), tensor), self.module)
        if spec.random:
            self._count(name)
        if spec.dynamic:
            self._send_spec(self.tape.key(SHAPES, call), spec)
        if spec.random and self._is_seeded():
            self._send_to_all(Message(self.tape.key(READ, call), text=self.pipeline.streams.to_text()))
        return self.place_results(result, tensors, entered, spec, name, alias)

    def _heard(self, key: Signature, name: str) -> Spec | None:
        """A signature that another rank has sent already, because it ran the same call before."""
        number = digest(name, key[1:])
        for peer in self.pipeline.others():
            message = self.pipeline.channel.mailbox.take(peer, Key(SPEC, self.pipeline.generation, 0, number))
            if message is not None:
                self.pipeline.specs[key] = spec = Spec.from_text(message.text or "")
                return spec
        return None

    def _run(
        self, key: Signature, name: str, function: Callable[[Any], Any], local: Any, inputs: Any, tensors: list[Tensor],
        transform: Callable[[Tensor], Tensor],
    ) -> tuple[Any, Spec]:  # fmt: skip
        """The result of a call on its local arguments, and what is known of the call by then.

        Other microbatches may have had the turn while the arguments arrived, and made this very call: so this is the
        moment to ask whether the call is the first of its signature, and nothing was drawn before.
        """
        spec = self.pipeline.specs.get(key)
        if spec is None:
            return self._first_run(key, name, function, local, inputs, [*map(transform, tensors)])
        if not spec.random or self._is_seeded():
            return function(local), spec
        with self.pipeline.streams.own(self._call_seed(name), spec.random):
            return function(local), spec

    def _first_run(
        self, key: Signature, name: str, function: Callable[[Any], Any], local: Any, inputs: Any, tensors: list[Tensor]
    ) -> tuple[Any, Spec]:  # fmt: skip
        """The first call of a signature: its result, and what watching it has shown."""
        streams = self.pipeline.streams
        own = streams.own(self._call_seed(name), TORCH | PYTHON | NUMPY)
        with nullcontext() if self._is_seeded() else own:
            before = [streams.capture(which) for which in (TORCH, PYTHON, NUMPY)]
            untouched = [unwritten(tensor) for tensor in tensors]
            with Watch() as watch:
                result = function(local)
            random = sum(
                which
                for which, state in zip((TORCH, PYTHON, NUMPY), before, strict=True)
                if not same_states(state, streams.capture(which))
            )
        check_outside(name, result, tensors)
        mutated = tuple(number for number, as_before in enumerate(untouched) if not as_before())
        dynamic = watch.dynamic or bool(random & ~TORCH)
        if isinstance(result, Filled):
            dynamic |= result.uncertain
            result = result if dynamic else result.without_numbers()
        description, passed = describe_result(result, name, inputs, tensors, self.pipeline.size > 1)
        self.pipeline.specs[key] = spec = Spec(description, dynamic, random, mutated, passed)
        return result, spec

    def _localiser(self, entered: dict[int, Tensor], fresh: set[int]) -> Callable[[Tensor], Tensor]:
        """Maps argument tensors to local ones; leaves in ``fresh`` (to be written into) become copies."""

        def transform(tensor: Tensor) -> Tensor:
            known = entered.get(id(tensor))
            if known is not None:
                return known
            value = self.value_of(tensor)
            if value is not None:
                local = self.local(tensor, value)
            elif self.tape.replicated and (value := self.tape.replicated.value_of(tensor)) is not None:
                local = self.tape.enter(value, tensor)
            else:
                return tensor
            if id(tensor) in fresh:
                local = self.aliases.writable(tensor, value, local)
            entered[id(tensor)] = local
            return local

        return transform

    def _announce_once(self, key: Signature, name: str, spec: Spec) -> None:
        """Send the others a signature, the first time that this rank runs it.

        Even if a rank has sent it before: those that wait for this call wait for this rank, and may not have come
        to where they would hear of the other one.
        """
        if key not in self.pipeline.announced:
            self.pipeline.announced.add(key)
            self._send_spec(Key(SPEC, self.pipeline.generation, 0, digest(name, key[1:])), spec)

    def _send_spec(self, key: Key, spec: Spec) -> None:
        self._send_to_all(Message(key, text=spec.to_text()))

    def _send_to_all(self, message: Message) -> None:
        for peer in self.pipeline.others():
            self.pipeline.channel.send(peer, message)

    def _is_seeded(self) -> bool:
        """True if the step has set a seed in this microbatch: all calls draw from one stream then."""
        return self.pipeline.streams.is_seeded_anew(mix(self.seed, self.microbatch.index))

    def _call_seed(self, name: str) -> int:
        """For a call that may draw random numbers: the same wherever it runs."""
        return call_seed(self.seed, self.microbatch.index, name, self.drawn)

    def _count(self, name: str) -> None:
        """A call of that name has drawn."""
        self.drawn[name] = self.drawn.get(name, 0) + 1

    def place_results(
        self, result: Any, tensors: list[Tensor], entered: dict[int, Tensor], spec: Spec, name: str,
        alias: Alias | None,
    ) -> Any:  # fmt: skip
        """Give every tensor of a result its value; one that is not new becomes an alias of what it was."""
        known = {id(tensor) for tensor in tensors}
        known.update(id(tensor) for tensor in entered.values())
        if (
            type(result) is Tensor
            and alias is None
            and not spec.passed
            and id(result) not in known
            and not self._is_marked(result)
        ):
            self.placed.place(result, self.rank)
            if not spec.returns(result.shape):
                self._check_shapes(spec, [result.shape], name)
            return result
        placed: dict[int, Tensor] = {}
        shapes: list[torch.Size] = []
        aliases = []
        if alias is None:
            aliases = self.aliases.of_results(self.rank, spec.passed, tensors, entered)

        def place(tensor: Tensor) -> Tensor:
            done = placed.get(id(tensor))
            if done is not None:
                return done
            given = None if alias is not None else argument_passed_on(spec, tensors, len(shapes))
            if given is not None:
                placed[id(tensor)] = given
                shapes.append(given.shape)
                return given
            new = tensor
            if id(tensor) in known or self._is_marked(tensor):
                new = tensor.view_as(tensor)
            shared = aliases[len(shapes)] if len(shapes) < len(aliases) else alias
            self.placed.place(new, self.rank, shared)
            if shared is not None:
                self.aliases.join(new, shared)
            placed[id(tensor)] = new
            shapes.append(new.shape)
            return new

        result = map_tensors(result, place)
        self._check_shapes(spec, shapes, name)
        return result

    @staticmethod
    def _is_marked(tensor: Tensor) -> bool:
        """True if the tensor has a value or an owner already."""
        return tensor._weft_value is not None or tensor._weft_owner is not None  # type: ignore[attr-defined]

    def _check_shapes(self, spec: Spec, shapes: list[torch.Size], name: str) -> None:
        announced = shapes_in(spec.description)
        if announced != [*map(list, shapes)]:
            raise DivergenceError(
                f"{name} returned tensors of shapes {[list(s) for s in shapes]}, but the first time with the same "
                f"arguments it returned {announced}. If its result depends on something else than its arguments' "
                "values, keep the module that uses the result in the same piece: weft.set_partition(parent, index)"
            )

    def _check_filled(
        self, spec: Spec, filled: Filled, name: str, inputs: Any, tensors: Sequence[Tensor]
    ) -> None:
        description, _ = describe_result(filled, name, inputs, tensors, self.pipeline.size > 1)
        if not puts_the_same(spec.description, description):
            raise DivergenceError(
                f"{name} put something else into a list, dict or object that it was given than the first time with the "
                "same arguments, which the other ranks do not know: keep what uses it in the same piece: "
                "weft.set_partition(parent, index)"
            )

    def placeholders_for(
        self, spec: Spec, owner: int, tensors: list[Tensor], inputs: Any, alias: Alias | None = None
    ) -> Any:
        """The result of a call on another rank, with placeholders for its tensors."""
        for number in spec.mutated:
            self.aliases.overwrite(tensors[number], owner, None, self.module)
        aliases = [] if alias is not None else self.aliases.of_results(owner, spec.passed, tensors, {})
        made: list[Tensor] = []

        def make(description: list[Any]) -> Tensor:
            given = None if alias is not None else argument_passed_on(spec, tensors, len(made))
            if given is not None:
                return given
            return self.placeholder(description, owner, aliases[len(made)] if aliases else alias)

        return build(spec.description, made, make, inputs)

    def placeholder(self, description: list[Any], owner: int, alias: Alias | None = None) -> Tensor:
        """A tensor that a call on another rank returned, without data."""
        new = meta_from(description)
        self.placed.place(new, owner, alias)
        return new

    def close(self) -> None:
        """Let go of everything: values that outlive the microbatch must not keep what it has recorded."""
        self.tape.clear()
        self.placed.close()
        filled = self.pipeline.filled
        for key in [key for key, (_, batch) in filled.items() if batch is self.placed.batch]:
            del filled[key]
        self.aliases.renewed.clear()

    # --- reading ------------------------------------------------------------------------------------

    def read(self, tensor: Tensor, value: Value, function: Callable[[Tensor], Any], name: str) -> Any:
        """A Python value out of a placed tensor: the owner computes it and sends it to all."""
        key = self.tape.key(READ, self.next_call((f"the value that {name} reads",)))
        if value.owner != self.rank:
            message = self.microbatch.receive(value.owner, key, f"the value that {name} reads")
            return decode(message)
        result = function(settled(self.local(tensor, value)))
        text, payload = encode(result, name)
        self._send_to_all(Message(key, payload, text))
        return result


def argument_passed_on(spec: Spec, tensors: list[Tensor], number: int) -> Tensor | None:
    """The argument that a result is itself, without grad mode: gradients go through it as through the argument."""
    if torch.is_grad_enabled() or number >= len(spec.passed) or spec.passed[number] < 0:
        return None
    return tensors[spec.passed[number]]
