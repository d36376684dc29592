"""PipeDream's text format for per-layer profiles.

A line at the margin is a layer, an indented line an edge; lines are in any order:

    node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
    node2 -- Linear(4, 4) -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, parameter_size=80.0
    <tab>node1 -- node2

Times are milliseconds for one mini-batch of the profile, sizes are bytes, and a layer with several results
lists their sizes: `activation_size=[64.0; 32.0]`. What a layer keeps for its backward pass is taken to be its
result, as the profile says nothing else.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, and
its repository github.com/msr-fiddle/pipedream.
"""  # noqa: E501

from __future__ import annotations

import heapq
import math
import re
from typing import NamedTuple

from weft.errors import FormatError
from weft.graph.model import LARGEST, Graph, Tensor, Unit
from weft.untrusted import cut, listed

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_EXAMPLE = f"name -- layer -- {', '.join(f'{field}=0.0' for field in _FIELDS)}"


class _Layer(NamedTuple):
    line: int
    values: dict[str, float]


def read_profile(text: str) -> Graph:
    """The graph of a profile; a fault is named by its line.

    Units are in topological order: of the layers whose inputs are there, the one with the smallest number
    in its name comes first. Each has the name of its node.

    >>> costs = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, parameter_size=80.0"
    >>> read_profile(f"node2 -- Tanh -- {costs}\\nnode1 -- Linear -- {costs}\\n\\tnode1 -- node2").tensors
    (Tensor(source='node1', targets=('node2',), bytes=64),)
    """
    layers: dict[str, _Layer] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.strip().split(" -- ")
        if line[0].isspace():
            if len(parts) != 2:
                raise FormatError(
                    f'line {number}: "{_short(line)}" is not an edge: write two names, "node1 -- node2"'
                )
            edges.setdefault((parts[0], parts[1]), number)
            continue
        if parts[0] in layers:
            raise FormatError(
                f'line {number}: "{_short(parts[0])}" is on line {layers[parts[0]].line} already'
            )
        layers[parts[0]] = _Layer(number, _values(line, parts, number))
    if not layers:
        raise FormatError(f'line 1: there is no layer: write "{_EXAMPLE}"')
    return _graph(layers, edges)


def _values(line: str, parts: list[str], number: int) -> dict[str, float]:
    """The numbers of a layer's line."""
    if len(parts) < 3:
        raise FormatError(f'line {number}: "{_short(line)}" is not a layer: write "{_EXAMPLE}"')
    given = dict(part.split("=", 1) for part in parts[-1].split(", ") if "=" in part)
    values = {}
    for field in _FIELDS:
        if field not in given:
            raise FormatError(f"line {number}: {field} is missing; the layer has {listed(given) or 'none'}")
        try:
            value = sum(float(part) for part in given[field].strip("[] ").split(";"))
        except ValueError as error:
            raise FormatError(
                f'line {number}: {field} is "{_short(given[field])}", which is no number'
            ) from error
        if not 0.0 <= value <= LARGEST:
            raise FormatError(f"line {number}: {field} is {value}, it must be a number from 0 to {LARGEST:g}")
        values[field] = value
    return values


def _graph(layers: dict[str, _Layer], edges: dict[tuple[str, str], int]) -> Graph:
    after: dict[str, list[str]] = {name: [] for name in layers}
    waiting = dict.fromkeys(layers, 0)
    for (source, target), number in edges.items():
        for name in (source, target):
            if name not in layers:
                raise FormatError(f'line {number}: there is no layer "{_short(name)}"')
        after[source].append(target)
        waiting[target] += 1
    order: list[str] = []
    ready = [(_number(name), name) for name in layers if not waiting[name]]
    heapq.heapify(ready)
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for target in after[name]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (_number(target), target))
    if len(order) < len(layers):
        stuck = min((name for name in layers if waiting[name]), key=lambda name: layers[name].line)
        raise FormatError(
            f'line {layers[stuck].line}: "{stuck}" needs its own result: the edges make a cycle'
        )
    place = {name: index for index, name in enumerate(order)}
    return Graph(
        (_unit(name, layers[name].values) for name in order),
        (
            Tensor(
                name,
                tuple(sorted(after[name], key=place.__getitem__)),
                round(layers[name].values["activation_size"]),
            )
            for name in order
            if after[name]
        ),
    )


def _unit(name: str, values: dict[str, float]) -> Unit:
    size = round(values["activation_size"])
    return Unit(
        name,
        forward_ms=values["forward_compute_time"],
        backward_ms=values["backward_compute_time"],
        parameter_bytes=round(values["parameter_size"]),
        activation_bytes=size,
        output_bytes=size,
    )


def _number(name: str) -> tuple[float, str]:
    """The first number in a name; names without one come last, by the alphabet."""
    match = re.search(r"[0-9]+", name)
    return (float(match[0]) if match else math.inf, name)


def _short(line: str) -> str:
    return cut(line.strip(), 60)
