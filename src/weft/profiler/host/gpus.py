"""The GPUs of a host, as NVIDIA's library (`nvidia-ml-py`, the module ``pynvml``) tells of them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.analysis.run import Device

THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons for a slower clock: the power cap, the hardware, heat as software and as hardware see it, the power brake."""


class Gpus:
    """The GPUs of this host; none where the library or a GPU is missing.

    Args:
        library: The module, or a fake of it.
    """

    def __init__(self, library: Any = None) -> None:
        self._library, self._handles = library, []
        if library is None:
            with suppress(ImportError):
                self._library = importlib.import_module("pynvml")
        if self._library is None:
            return
        with suppress(Exception):  # no driver, say; the library's errors are of its own kinds
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            self._handles = [self._library.nvmlDeviceGetHandleByIndex(number) for number in range(count)]

    def look(self) -> tuple[Device, ...]:
        """The present state of each GPU."""
        return tuple(map(self._device, self._handles))

    def _device(self, handle: Any) -> Device:
        library = self._library
        memory = _known(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        return Device(
            _number(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            0 if memory is None else int(memory.used),
            0 if memory is None else int(memory.total),
            _number(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
            _number(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            bool(
                (_known(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0) & THROTTLED
            ),
        )


def _known(ask: Callable[[], Any]) -> Any:
    """The library's answer; None where this GPU has none."""
    with suppress(Exception):
        return ask()
    return None


def _number(ask: Callable[[], Any]) -> float:
    found = _known(ask)
    return math.nan if found is None else float(found)
