"""The calls of a LightningModule's hooks, which run once for each microbatch.

self.log(...)                  kept aside, and logged once, with what the whole batch would give
metric(...), metric.update()   the same: they get the whole batch's predictions
opt.zero_grad(), opt.step(), sch.step(), self.clip_gradients(), self.manual_backward()
                               of manual optimization: around the step, once, in their order
self.logger, opt.toggle_model(), ...   refused by name
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from weft.errors import UsageError
from weft.integrations import torchmetrics
from weft.integrations.whole import Whole, current, mean_of
from weft.session import ranks

LOG, LATER, BACKWARD = "log", "call", "backward"
_REDUCTIONS = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}
_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")
_UPDATES = "set partitions=1, with which manual optimization runs as ever"
_LOGGERS = "use self.log() there, and self.logger in a hook such as on_train_batch_end()"


class Inside:
    """The hooks of one module, as a strategy runs them."""

    def __init__(self, strategy: Any, trainer: Any, module: Any) -> None:
        self.strategy = strategy
        self.trainer = trainer
        self.module = module
        self._log = type(module).log.__get__(module)
        self._log_arguments = inspect.signature(self._log)
        self._whole: Whole | None = None
        module.__dict__["log"] = self._logged

    def restore(self) -> None:
        """Leave the module as it was."""
        self.module.__dict__.pop("log", None)

    # --- in microbatches -------------------------------------------------------------------------------------

    @contextmanager
    def microbatches(self, what: str) -> Iterator[None]:
        """Around a step of which `what` is the function."""
        module, trainer, loggers = self.module, self.trainer, self.trainer.loggers
        found = {
            "optimizers": functools.partial(self._proxies, module.optimizers),
            "lr_schedulers": functools.partial(self._proxies, module.lr_schedulers),
            "clip_gradients": functools.partial(self._keep, module.clip_gradients, "clip_gradients"),
            **{name: _refuse(f"self.{name}()", what, _UPDATES) for name in _TOGGLES},
        }
        module.__dict__.update(found)
        trainer.loggers = [_Refusing("self.logger", what, _LOGGERS)] if loggers else []
        try:
            with torchmetrics.kept_aside(module, what):
                yield
        finally:
            trainer.loggers = loggers
            for name in found:
                module.__dict__.pop(name, None)

    def _logged(self, *args: Any, **kwargs: Any) -> None:
        """`self.log`, for as long as the strategy has the module."""
        given = dict(self._log_arguments.bind(*args, **kwargs).arguments)
        record = current()
        if record is None:
            self._log_of_all(given)
            return
        value = given["value"]
        if isinstance(value, torchmetrics.Later):
            given["value"] = None
            record.add(LOG, given["name"], {"of": value.__dict__["number"], **given})
        else:
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"self.log({given['name']}, ...) takes one number, not a tensor of {value.numel()}"
                )
            record.add(LOG, given["name"], {"of": None, **given})

    def _log_of_all(self, given: dict[str, Any]) -> None:
        """Replicas log their mean, so that a Trainer that decides by it decides alike on all of them."""
        if isinstance(given["value"], (Tensor, int, float)) and not given.get("rank_zero_only"):
            given["sync_dist"] = given.get("sync_dist", False) or ranks.rdp_size() > 1
        self._log(**given)

    def _keep(self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """A call that is made once, after the microbatches."""
        record = current()
        if record is None:
            return function(*args, **kwargs)
        args = tuple(each.__dict__["real"] if isinstance(each, _Proxy) else each for each in args)
        record.add(LATER, name, {"function": function, "args": args, "kwargs": kwargs})
        return None

    def _proxies(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if current() is None or found is None:
            return found
        return [_Proxy(self, each) for each in found] if isinstance(found, list) else _Proxy(self, found)

    def going_backward(self, loss: Tensor) -> None:
        """`self.manual_backward()` in a microbatch."""
        record = current()
        assert record is not None
        kinds = [entry.kind for entry in record.entries if entry.kind in (LATER, BACKWARD)]
        if BACKWARD in kinds and kinds[-1] == LATER:
            late = [entry.key for entry in record.entries if entry.kind == LATER][-1]
            raise UsageError(
                f"training_step goes backward again after {late}(), but the microbatches of a split model are in "
                f"flight together: update once, after all backward passes, or {_UPDATES}"
            )
        record.add(BACKWARD, "manual_backward", loss.detach())

    # --- after them ------------------------------------------------------------------------------------------

    def replay(self, whole: Whole) -> None:
        """Count and log what the whole batch gives."""
        self._whole = whole
        values = torchmetrics.call_for_all(whole)
        for _, kind, _, contents, _ in whole.entries():
            if kind == LOG:
                self._log_of_all(self._one(contents, whole.weights, values))

    def _one(
        self, contents: Sequence[dict[str, Any]], weights: Sequence[float], values: dict[int, Any]
    ) -> dict[str, Any]:
        """The entry to log in place of those of the microbatches."""
        given = dict(contents[0])
        number = given.pop("of")
        if number is not None:
            return {**given, "value": values[number]}
        logged = [content["value"] for content in contents]
        if not isinstance(logged[0], (Tensor, int, float)):
            return given  # a metric itself
        sizes = [int(content.get("batch_size") or 0) for content in contents]
        if all(sizes):
            given["batch_size"] = sum(sizes)
            weights = [size / sum(sizes) for size in sizes]
        how = given.get("reduce_fx", "mean")
        name = _REDUCTIONS.get(getattr(how, "__name__", how), "mean")
        return {**given, "value": mean_of(logged, weights, name)}

    def finish_manual(self) -> None:
        """Runs the calls of manual optimization that were kept from `training_step`, once and in their order."""
        whole, self._whole = self._whole, None
        assert whole is not None
        plugin = self.strategy.precision_plugin
        for _, kind, _, _, joined in whole.entries():
            if kind == BACKWARD:
                loss = plugin.pre_backward(joined(), self.module)
                self.strategy.add_gradients()
                plugin.post_backward(loss, self.module)
            elif kind == LATER:
                content = joined()
                content["function"](*content["args"], **content["kwargs"])


class _Proxy:
    """An optimizer or scheduler in a microbatch: what changes something is done later, once."""

    _LATER = ("step", "zero_grad")
    _REFUSED = ("toggle_model", "load_state_dict", "add_param_group")

    def __init__(self, inside: Inside, real: Any) -> None:
        self.__dict__.update(inside=inside, real=real)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in self._LATER:
            return functools.partial(self._later, name)
        if name in self._REFUSED:
            return _refuse(f"{_name(own['real'])}.{name}()", "training_step", _UPDATES)
        return getattr(own["real"], name)

    def _later(self, name: str, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        label = f"{_name(own['real'])}.{name}"
        if any(map(callable, (*args, kwargs.get("closure")))):
            raise UsageError(
                f"{label}(closure) would compute in an update, but a split model updates after its microbatches: go "
                "backward first, then call it without a closure"
            )
        return own["inside"]._keep(getattr(own["real"], name), label, *args, **kwargs)


class _Refusing:
    """Stands for what a microbatch must not use."""

    def __init__(self, *texts: str) -> None:
        self.__dict__["texts"] = texts

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(*self.__dict__["texts"])()


def _refuse(name: str, what: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f"{name} was used in {what}, which runs once for each microbatch: {advice}")

    return refuse


def _name(optimizer: Any) -> str:
    """Of its class, without what Lightning has put before it."""
    return type(optimizer).__name__.removeprefix("Lightning")
