"""The rates of a device by which a trace without values estimates its times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.machines.accelerator import Accelerator

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LEAST_S = 5e-6
"""Seconds that any operation takes on an accelerator: its launch."""


@dataclass(frozen=True)
class DeviceRates:
    """The seconds of operations on an accelerator, by its products' and its memory's rates.

    Attributes:
        device: The accelerator.
    """

    device: Accelerator

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | None) -> float:
        """The seconds of an operation that computes so much, and reads and writes so much."""
        moved_s = self.device.move_s(moved_bytes)
        if not flops:
            return max(moved_s, LEAST_S)
        return max(self.device.product_s(flops, self._name(dtype)), moved_s)

    def _name(self, dtype: torch.dtype | None) -> str:
        """The device's word for a type; the nearest that it has a rate for."""
        wanted = "fp32" if dtype not in NAMES else NAMES[dtype]
        if wanted == "fp32" and torch.backends.cuda.matmul.allow_tf32 and "tf32" in self.device.peak:
            return "tf32"
        others = (wanted, "fp32", "tf32", "fp16", "bf16")
        return next((name for name in others if name in self.device.peak), next(iter(self.device.peak)))
