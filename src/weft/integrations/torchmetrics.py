"""Metrics that are called in a step get the whole batch's predictions, once, after it.

The class ``torchmetrics.Metric`` is asked to keep calls aside while a microbatch runs; outside of them it is as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from weft.errors import UsageError
from weft.integrations.whole import Whole, current

CALL = "metric"
"""The kind of entry of a metric that was called."""


class Later:
    """Stands for the value of a metric for a batch whose microbatches have not all run; it may be logged."""

    def __init__(self, number: int, name: str) -> None:
        self.__dict__.update(number=number, name=name)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"the value of {self.__dict__['name']} for a batch is known after its step only: log it with self.log(), "
            "or log the metric itself"
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __float__ = __int__ = __bool__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = __format__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(each for each in args if isinstance(each, Later))._refuse()


def classes() -> tuple[type[nn.Module], ...]:
    """``Metric`` and ``MetricCollection``, if the script has torchmetrics at all."""
    library: Any = sys.modules.get("torchmetrics")
    return (library.Metric, library.MetricCollection) if library is not None else ()


def _keep_calls_aside(kind: Any) -> None:
    """Let ``metric(...)`` be recorded in microbatches, before weft takes the metric for a part of the model."""
    if "__call__" in vars(kind):
        return  # that is done
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if current() is None else _keep(self, "forward", args, kwargs)

    kind.__call__ = call


def _keep(metric: Any, method: str, args: Any, kwargs: Any) -> Later:
    record = current()
    assert record is not None
    name = f"{type(metric).__name__}.{method}()"
    return Later(record.add(CALL, name, {"metric": metric, "args": args, "kwargs": kwargs}), name)


@contextmanager
def kept_aside(module: nn.Module, what: str) -> Iterator[None]:
    """Inside, calls of the metrics in ``module`` are recorded; reading and resetting them is refused."""
    kinds = classes()
    for kind in kinds:
        _keep_calls_aside(kind)
    metrics = [each for each in module.modules() if isinstance(each, kinds)] if kinds else []
    before = [(each, dict(each.__dict__)) for each in metrics]
    for each in metrics:
        _set(each, "update", functools.partial(_keep_update, each))
        for name in ("compute", "reset"):
            _set(each, name, _refusing(f"{type(each).__name__}.{name}() was called in {what}"))
    try:
        yield
    finally:
        for each, attributes in before:
            for name in ("update", "compute", "reset"):
                each.__dict__.pop(name, None)
                if name in attributes:
                    _set(each, name, attributes[name])


def _keep_update(metric: Any, *args: Any, **kwargs: Any) -> None:
    _keep(metric, "update", args, kwargs)


def _set(thing: Any, name: str, value: Any) -> None:
    thing.__dict__[name] = value


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"{text}, which runs once for each microbatch: call it in a hook such as on_train_batch_end() or "
            "on_validation_epoch_end()"
        )

    return refuse


def call_for_all(whole: Whole) -> dict[int, Any]:
    """Call the metrics with the whole batch's arguments; what they gave, by the number of the entry."""
    values = {}
    for number, kind, key, _, joined in whole.entries():
        if kind == CALL:
            content = joined()
            called = content["metric"].update if key.endswith(".update()") else content["metric"]
            values[number] = called(*content["args"], **content["kwargs"])
    return values
