"""The scale that keeps 16-bit gradients from vanishing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.errors import UsageError


@dataclass
class LossScale:
    """A loss scale that adapts, if it is ``dynamic``.

    An overflow divides it by ``scale_factor``; ``scale_window`` steps without one multiply it.

    ``delayed_shift``: so many overflows are left out before the scale falls; ``consecutive_hysteresis``: a good step
    restores that number; else only a rise does.

    >>> scale = LossScale(True, 8.0, scale_window=2)
    >>> for overflow in (True, False, False):
    ...     scale.update(overflow)
    ...     print(scale.loss_scale)
    4.0
    4.0
    8.0
    """

    dynamic: bool
    loss_scale: float
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    steps: int = 0
    last_overflow: int = -1
    hysteresis: int = 0

    def __post_init__(self) -> None:
        self.hysteresis = self.hysteresis or self.delayed_shift

    @classmethod
    def of(cls, scales: bool, static: float | None, dynamic: bool, arguments: Mapping[str, Any]) -> LossScale:
        """The loss scale that the optimizer's arguments describe; always 1 if the loss is not to be scaled."""
        known = {"init_scale", *(f.name for f in fields(cls)[2:7])}
        unknown = sorted(set(arguments) - known)
        if unknown:
            raise UsageError(
                f"the loss scale has no argument {', '.join(unknown)}: they are {', '.join(sorted(known))}"
            )
        given = dict(arguments)
        first = float(given.pop("init_scale", 2.0**32))
        if not scales:
            return cls(False, 1.0)
        scale = first if dynamic else float(static if static is not None else 1.0)
        if scale <= 0:
            raise UsageError(f"the loss scale is {scale:g}: give a number above 0")
        return cls(dynamic, scale, **given)

    @property
    def cur_scale(self) -> float:
        """Another name of ``loss_scale``."""
        return self.loss_scale

    def update(self, overflow: bool) -> None:
        """A step has ended."""
        if self.dynamic and overflow:
            if self.hysteresis <= 1:
                self.loss_scale = max(self.loss_scale / self.scale_factor, self.min_scale)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.steps
        elif self.dynamic:
            if self.consecutive_hysteresis:
                self.hysteresis = self.delayed_shift
            if (self.steps - self.last_overflow) % self.scale_window == 0:
                self.hysteresis = self.delayed_shift
                self.loss_scale *= self.scale_factor
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        for name, value in content.items():
            if name in {f.name for f in fields(self)}:
                setattr(self, name, value)
