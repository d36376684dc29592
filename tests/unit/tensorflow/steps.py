"""Steps without TensorFlow: records drawn at random, and what their operations compute, one by one.

An operation's outputs are a digest of its number, of its inputs and of the variables that it reads. A variable that is
written becomes a digest of its old value and of what was written. So whatever runs too early, too late, twice or with
another microbatch's value changes what comes after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.tensorflow.trace.operations import Operation, Record, Value, Variable


def first_value(variable: int) -> int:
    """What a variable holds before the step."""
    return hash((variable, 77))


def argument(number: int, microbatch: int) -> int:
    """What an argument of the step is, by its operation's number."""
    return hash((number, microbatch, 99))


def compute(
    record: Record, number: int, take: Callable[[Value], int], variables: dict[int, int]
) -> dict[Value, int]:
    """The outputs of an operation, which is no argument and no variable; writes into ``variables``."""
    operation = record.operations[number]
    taken = [take(value) for value in operation.inputs if record.operations[value.operation].variable < 0]
    seen = hash((number, *taken, *(variables[each] for each in sorted(operation.reads))))
    for each in operation.writes:
        variables[each] = hash((seen, variables[each]))
    return {Value(number, output): hash((seen, output)) for output in range(len(operation.sizes))}


def run_alone(record: Record, microbatches: int) -> tuple[list[dict[Value, int]], dict[int, int]]:
    """What one process computes: the values of each microbatch, and the variables in the end."""
    variables = {number: first_value(number) for number in range(len(record.variables))}
    order = record.in_order()
    found = []
    for microbatch in range(microbatches):
        values: dict[Value, int] = {}
        for number in order:
            if record.operations[number].feed:
                values[Value(number, 0)] = argument(number, microbatch)
            elif record.operations[number].variable < 0:
                values |= compute(record, number, values.__getitem__, variables)
        found.append(values)
    return found, variables


def with_controls(record: Record) -> Record:
    """The record with the order of effects that TensorFlow keeps: reads after the last write, writes after all before.

    ``tf.function`` and the trace get it from ``AutomaticControlDependencies``.
    """
    written: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    operations = []
    for number, operation in enumerate(record.operations):
        before = set(operation.controls)
        for variable in operation.reads:
            if variable in written:
                before.add(written[variable])
            if variable in operation.writes:
                before |= set(readers.pop(variable, ()))
                written[variable] = number
            else:
                readers.setdefault(variable, []).append(number)
        operations.append(replace(operation, controls=tuple(sorted(before))))
    return replace(record, operations=operations)


class Writer:
    """Writes a record, operation by operation."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.variables: list[Variable] = []
        self._handles: dict[int, Value] = {}

    def variable(self, name: str, model: bool = True) -> int:
        """A variable of ten numbers."""
        self.variables.append(Variable(name, 40, 10, model))
        return len(self.variables) - 1

    def argument(self) -> Value:
        """A tensor that the step is called with."""
        return self.add(kind="Placeholder", feed=True)

    def add(self, *inputs: Value, outputs: int = 1, reads=(), writes=(), sendable=True, **more) -> Value:
        """One operation; its first output. Variables are given by their numbers, their handles become inputs."""
        handles = [self._handle(each, more.get("unit", "")) for each in (*reads, *writes)]
        number = len(self.operations)
        more.setdefault("kind", "Some")
        self.operations.append(
            Operation(
                more.pop("name", f"operation{number}"),
                inputs=(*inputs, *handles),
                sizes=(8,) * outputs,
                sendable=(sendable,) * outputs,
                stateful=bool(reads or writes) or more.pop("stateful", False),
                reads=frozenset(reads) | frozenset(writes),
                writes=frozenset(writes),
                **more,
            )
        )
        return Value(number, 0)

    def _handle(self, variable: int, unit: str) -> Value:
        """The stand-in of a variable, made where it is used first, inside of a layer's call if need be."""
        if variable not in self._handles:
            self._handles[variable] = Value(len(self.operations), 0)
            name = self.variables[variable].name
            self.operations.append(
                Operation(name, "Placeholder", unit=unit, variable=variable, sendable=(False,))
            )
        return self._handles[variable]

    def record(self, results: Mapping[Value, frozenset[int]] | None = None) -> Record:
        """The record. ``results``: what the step returns, with the variables whose gradients they are."""
        results = results or {}
        return with_controls(Record(self.operations, self.variables, list(results), list(results.values())))


class Draw(Writer):
    """A step drawn at random: glue, one or two models, a loss, gradients, what is done with these, and results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self._made: list[Value] = []
        self._models: list[list[int]] = []
        self._outside: list[int] = []
        self._calls: dict[str, int] = {}
        self._results: dict[Value, frozenset[int]] = {}
        self._gradients: dict[int, Value] = {}
        self._trains = self._chance(0.9)

    def drawn(self) -> Record:
        """The step."""
        dice = self._dice
        self._made = [self.argument() for _ in range(dice.randint(1, 3))]
        self._outside = [self.variable(f"outside{n}", model=False) for n in range(dice.randint(0, 2))]
        if self._chance(0.1):
            self.variable("unused")
        self._glue(dice.randint(0, 3))
        for number in range(dice.choice((1, 1, 2))):
            layers = dice.randint(1, 5)
            self._models.append(
                [self.variable(f"model{number}/variable{n}") for n in range(layers + dice.randint(0, 2))]
            )
            self._model(number, layers)
            self._glue(dice.randint(0, 2))
        loss = self._glue(1)
        self._results[loss] = frozenset()
        if self._trains:
            self._backward(loss)
        self._glue(dice.randint(0, 2))
        if self._trains and self._chance(0.15):
            self._model(0, 2)  # once more, maybe with gradients among its inputs
            self._results[self._glue(1)] = frozenset()
        if self._trains:
            self._use_gradients()
        for value in dice.sample(self._made, min(2, len(self._made))):
            if self.operations[value.operation].sendable[value.output]:
                self._results.setdefault(value, frozenset())
        record = self.record(self._results)
        if self._chance(0.2):
            record.results.append(None)
            record.gradients.append(frozenset())
        return record

    def _chance(self, share: float) -> bool:
        return self._dice.random() < share

    def _some(self, most: int = 2, sendable: bool = False) -> list[Value]:
        """Values that were made, recent ones more often."""
        found = []
        fitting = [
            value
            for value in self._made
            if not sendable or self.operations[value.operation].sendable[value.output]
        ]
        for _ in range(self._dice.randint(1, most)):
            recent = self._chance(0.7)
            found.append(self._dice.choice(fitting[-4:] if recent else fitting))
        return list(dict.fromkeys(found))

    def _keep(self, value: Value) -> Value:
        outputs = len(self.operations[value.operation].sizes)
        self._made += [Value(value.operation, output) for output in range(outputs)]
        return value

    def _glue(self, count: int) -> Value:
        """Operations outside of models."""
        last = self._made[-1]
        for _ in range(count):
            more = self._effects()
            if not more and self._chance(0.1):
                more["partition"] = 0
            inputs = [] if more and self._chance(0.3) else self._some(sendable=True)
            if self._chance(0.1):  # a text, made and taken outside of the models
                inputs = [*inputs[:1], self.add(*inputs, sendable=False)]
            last = self._keep(self.add(*inputs, outputs=self._dice.choice((1, 1, 2)), **more))
        return last

    def _effects(self) -> dict[str, Any]:
        """What an operation outside of models does with variables, if anything; often with one that was written."""
        own = self._dice.choice(self._models) if self._models else []
        written = {variable for operation in self.operations for variable in operation.writes}
        pool = self._outside if self._outside and self._chance(0.4) else own
        if pool and self._chance(0.4):
            if self._chance(0.5):
                pool = [variable for variable in pool if variable in written] or pool
            several = min(len(pool), self._dice.choice((1, 1, 2)))
            return {"writes" if self._chance(0.4) else "reads": self._dice.sample(pool, several)}
        return {"stateful": True} if self._chance(0.1) else {}

    def _model(self, number: int, layers: int) -> None:
        """One call of a model, layer by layer."""
        own = self._models[number]
        self._keep(self.add(*self._some(sendable=True), unit=f"model{number}*"))
        for layer in range(layers):
            name = f"model{number}/layer{layer}"
            self._calls[name] = self._calls.get(name, 0) + 1
            label = name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"
            variable = self._dice.choice(own) if self._chance(0.15) else own[layer % len(own)]
            more = {"partition": self._dice.randrange(3)} if self._chance(0.1) else {}
            inside = [*self._some(3, sendable=True)]
            if self._chance(0.8):
                inside.append(self._keep(self.add(reads=[variable], unit=label, **more)))
            for _ in range(self._dice.randint(1, 3)):
                kept = self._chance(0.9)  # the rest cannot be sent, and is used by what comes next anyway
                made = self.add(
                    *inside, unit=label, sendable=kept, outputs=self._dice.choice((1, 1, 2)), **more
                )
                inside = [made]
                if kept:
                    self._keep(made)
            if not kept:
                inside = [self._keep(self.add(*inside, unit=label))]
            if self._chance(0.2):
                state = self._dice.choice(own if self._chance(0.8) or not self._outside else self._outside)
                self._keep(self.add(*inside, writes=[state], unit=label))
            if self._chance(0.4):
                block = f"model{number}/block{layer // 2}*"
                beside = (made.operation,) if self._chance(0.2) else ()
                self._keep(self.add(*inside, *self._some(sendable=True), unit=block, beside=beside))
            if self._chance(0.05):
                self._keep(self.add(unit=label, stateful=True))

    def _backward(self, loss: Value) -> None:
        """The gradients of what leads to the loss: of most operations with their names, of some without."""
        arriving: dict[Value, list[Value]] = {loss: [self.add(loss, kind="Fill")]}
        for number in reversed(range(loss.operation + 1)):
            operation = self.operations[number]
            outputs = [Value(number, output) for output in range(len(operation.sizes))]
            if operation.feed or not any(value in arriving for value in outputs):
                continue
            if operation.variable >= 0:
                self._gradients[operation.variable] = self._sum(arriving[outputs[0]])
                continue
            given = [self._sum(arriving[value]) for value in outputs if value in arriving]
            source = number if self._chance(0.85) else -1
            saved = [
                value
                for value in (*operation.inputs, *outputs)
                if self._chance(0.5) and self.operations[value.operation].variable < 0
            ]
            again = sorted(operation.reads) if self._chance(0.2) else []
            made = self.add(
                *given, *saved, reads=again, gradient_of=source, outputs=self._dice.choice((1, 2))
            )
            if self._chance(0.1):
                self._remember(number)
            for value in operation.inputs:
                if self._chance(0.9):
                    other = self.add(made, gradient_of=source) if self._chance(0.2) else made
                    arriving.setdefault(value, []).append(other)

    def _sum(self, values: list[Value]) -> Value:
        return values[0] if len(values) == 1 else self.add(*values, kind="AddN")

    def _remember(self, number: int) -> None:
        """A loop gets one more input, a list that is made when its gradient is taken, and one more output."""
        operation = self.operations[number]
        if not operation.unit or operation.unit.endswith("*"):
            return
        earlier = [value for value in operation.inputs if self.operations[value.operation].variable < 0]
        shape = self.add(*earlier[:1], gradient_of=number)
        states = self.add(shape, gradient_of=number, sendable=False)
        operation = self.operations[number]
        operation.inputs = (*operation.inputs, states)
        operation.sizes, operation.sendable = (*operation.sizes, 0), (*operation.sendable, False)
        self.add(Value(number, len(operation.sizes) - 1), gradient_of=number)

    def _use_gradients(self) -> None:
        """What a step does with gradients: returns them, clips them, puts them into the variables."""
        found = dict(self._gradients)
        if found and self._chance(0.3):
            norm = self.add(*found.values(), kind="Norm")
            self._results[norm] = frozenset()
            found = {variable: self.add(value, norm, kind="Clip") for variable, value in found.items()}
        if self._chance(0.1):
            for variable, value in found.items():
                slots = [each for each in self._outside if self._chance(0.3)]
                self.add(value, writes=[variable, *slots], kind="Apply")
        for variable, value in found.items():
            self._results.setdefault(value, frozenset([variable]))


def drawn(seed: int) -> Record:
    """The random step with this number."""
    return Draw(seed).drawn()
