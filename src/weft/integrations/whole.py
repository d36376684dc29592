"""From what the microbatches of a step gave to what one process would have given for the whole mini-batch.

A loop that was written for one process calls the user's function once for each batch. With weft that function runs once
for each microbatch, so what it returns, logs and counts is kept aside in a `Record`, and joined after the step:

    tensors with rows     one after another
    single numbers        their mean, each with the share of samples that its microbatch has; or sum, least, largest
    anything else         has to be the same in all microbatches
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.output import StepOutput
from weft.torch.tensors.mini_batch import named_tensors
from weft.torch.tensors.pytree import BUILT_IN, map_tensors, nodes_with_paths, tensors_in

_running = threading.local()


class Entry:
    """Something that was called in a microbatch, to be called once for all of them: a form, and tensors in it."""

    def __init__(self, kind: str, key: str, content: Any) -> None:
        self.kind = kind
        self.key = key
        self.content = content


class Record:
    """The result of one microbatch: `output`, what its function returned, and `entries`, in their order.

    `fixed`: entries of these kinds have been met that nothing may follow.
    """

    def __init__(self) -> None:
        self.output: Any = None
        self.entries: list[Entry] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this is the record of the microbatch on this thread."""
        before = getattr(_running, "record", None)
        _running.record = self
        try:
            yield
        finally:
            _running.record = before

    def add(self, kind: str, key: str, content: Any) -> int:
        """One more entry; its number."""
        self.entries.append(Entry(kind, key, content))
        return len(self.entries) - 1

    def returned(self) -> dict[str, Any]:
        """The value that the step's function has to return, so that `whole` finds the tensors on every rank.

        The record itself goes as a function, which nobody looks into.
        """
        contents = [self.output, *(entry.content for entry in self.entries)]
        return {"tensors": [tensors_in(content) for content in contents], "record": lambda: self}


def current() -> Record | None:
    """The record of the microbatch that runs on this thread."""
    return getattr(_running, "record", None)


class Whole:
    """The results of a step for its mini-batch."""

    def __init__(self, result: Any, what: str) -> None:
        self._what = what
        if not isinstance(result, dict):
            raise UsageError(self._differs("returned or logged tensors that others did not"))
        self.records: list[Record] = [get() for get in result["record"]]
        self._tensors: list[list[StepOutput]] = result["tensors"]
        calls = [[(entry.kind, entry.key) for entry in record.entries] for record in self.records]
        if any(others != calls[0] for others in calls):
            names = sorted({str(key) for each in calls for _, key in set(each) ^ set(calls[0])})
            raise UsageError(self._differs(f"logged or called {', '.join(names) or 'in another order'}"))

    def _differs(self, how: str) -> str:
        return (
            f"{self._what}: some microbatches {how}, so nobody knows what the whole batch would give: do the same for "
            "every batch"
        )

    @property
    def weights(self) -> Sequence[float]:
        """The shares of samples that the microbatches have."""
        found = [each for tensors in self._tensors for each in tensors]
        return found[0].weights if found else [1 / len(self.records)] * len(self.records)

    def output(self) -> Any:
        """The value that the function would have returned for the whole batch."""
        return self._for_whole_batch(
            [record.output for record in self.records], self._tensors[0], "its result"
        )

    def entries(self) -> Iterator[tuple[int, str, str, list[Any], Callable[[], Any]]]:
        """Of each entry its number, kind and key, the microbatches' contents, and what makes one of them."""
        for number, entry in enumerate(self.records[0].entries):
            contents = [record.entries[number].content for record in self.records]
            tensors = self._tensors[number + 1]

            def joined(contents: list[Any] = contents, tensors: Any = tensors, key: str = entry.key) -> Any:
                return self._for_whole_batch(contents, tensors, key)

            filled = [_filled(one, [each.outputs[m] for each in tensors]) for m, one in enumerate(contents)]
            yield number, entry.kind, entry.key, filled, joined

    def _for_whole_batch(self, contents: list[Any], tensors: list[StepOutput], name: str) -> Any:
        forms = [map_tensors(content, _hidden) for content in contents]
        if any(not _equal(form, forms[0]) for form in forms):
            raise UsageError(
                f"{self._what}: {name} differs between microbatches in something that is no tensor, and cannot be put "
                "together to that of the whole batch: give tensors"
            )
        return _filled(contents[0], [one_of(each) for each in tensors])


def _hidden(tensor: Tensor) -> Any:
    """In place of a tensor, where only the rest counts."""
    return "<a tensor>"


def _filled(content: Any, tensors: list[Tensor]) -> Any:
    left = iter(tensors)
    return map_tensors(content, lambda _: next(left))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays
        return False


def one_of(output: StepOutput) -> Tensor:
    """A tensor of the whole batch: rows one after another, of numbers the mean."""
    return output.concat() if output.outputs[0].dim() else output.reduce_mean()


def mean_of(values: Sequence[Any], weights: Sequence[float], how: str = "mean") -> Any:
    """One number of those of the microbatches: "mean", "sum", "min" or "max"."""
    if how == "mean" and not any(isinstance(value, Tensor) for value in values):
        same = all(value == values[0] for value in values)
        return values[0] if same else sum(w * value for w, value in zip(weights, values, strict=True) if w)
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if how == "mean":
        return StepOutput(list(stacked), weights).reduce_mean()
    if how == "sum":
        return stacked.sum(0)
    return stacked.amin(0) if how == "min" else stacked.amax(0)


def refuse_uncut(batch: Any, what: str) -> None:
    """Refuse a batch of which microbatches would get more than their part.

    Raises:
        UsageError: It has lists with an item for each sample, or nothing in it is cut.
    """
    tensors = [tensor for _, tensor in named_tensors(batch, "batch")]
    if not tensors and not hasattr(batch, "smp_slice"):
        raise UsageError(
            f"{what} gets a {type(batch).__name__} without tensors that weft could cut into microbatches: give a "
            "tensor, or lists, tuples, dicts or dataclasses of tensors, or an object with smp_slice(num_mb, mb, axis)"
        )
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    nodes = nodes_with_paths(batch, "batch", (*BUILT_IN, UserDict)) if rows > 1 else ()
    found = next((path for path, node in nodes if _is_plain_list(node, rows)), None)
    if found is not None:
        raise UsageError(
            f"{what} gets a list of {rows} items that are no tensors, {found}, one for each sample, and weft cuts "
            "tensors only: leave it out of the batch, or make it a tensor in collate_fn"
        )


def _is_plain_list(node: Any, rows: int) -> bool:
    listed = isinstance(node, (list, tuple)) and len(node) == rows
    return listed and all(isinstance(item, (str, bytes, int, float)) for item in node)
