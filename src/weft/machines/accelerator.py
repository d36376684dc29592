"""An accelerator as numbers: what it could do, and the share of that which training reaches.

a matrix product of n FLOPs    (n + half_flops) / (peak * share)        at large n its share of peak, at n =
                                                                        half_flops half of that
moving n bytes                 n / (bytes_per_s * memory_share)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
BYTES_OF = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
"""Bytes of a parameter as matrices read it; with fp8 products the parameters stay in 16 bits."""


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Attributes:
        name: What it is called.
        memory_bytes: What it has.
        bytes_per_s: Its memory's bandwidth.
        peak: FLOPs a second of dense matrix products, by dtype, as its maker states them.
        share: The share of the peak that large products reach in training, by dtype.
        half_flops: FLOPs of a product that reaches half of that share: starting it, and filling all units.
        memory_share: The share of the memory's bandwidth that operations between products reach.
        attention_share: The share of the 16-bit peak that fused attention reaches.
        assumed: Which of these shares were neither fitted nor measured, in words; empty if all were.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    peak: Mapping[str, float]
    share: Mapping[str, float] = field(default_factory=dict)
    half_flops: float = 2e9
    memory_share: float = 0.7
    attention_share: float = 0.5
    assumed: str = ""

    @property
    def is_cpu(self) -> bool:
        """True if it is a host's processor, or a part of its cores."""
        return self.name.startswith("cpu:")

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}, it must be a number above 0"
            for name, value in (("memory_bytes", self.memory_bytes), ("bytes_per_s", self.bytes_per_s))
            if not 0 < value < math.inf
        ]
        if not self.peak:
            faults.append('it has no peak rate, give at least one: {"bf16": 312e12}')
        faults += [
            f"the peak rate of {dtype} is {rate}, it must be a number above 0"
            for dtype, rate in self.peak.items()
            if not 0 < rate < math.inf
        ]
        shares = {**self.share, "memory": self.memory_share, "attention": self.attention_share}
        faults += [
            f"the share of {name} is {share}, it must be above 0 and at most 1"
            for name, share in shares.items()
            if not 0 < share <= 1
        ]
        if not 0 <= self.half_flops < math.inf:
            faults.append(f"half_flops is {self.half_flops}, it must not be negative")
        if faults:
            raise ConfigError(f'accelerator "{self.name}": {"; ".join(faults)}')

    def rate(self, dtype: str) -> float:
        """FLOPs a second of large products in training.

        >>> Accelerator("A", 80 * 10**9, 2e12, {"fp16": 300e12}, {"fp16": 0.5}).rate("fp16")
        150000000000000.0
        """
        if dtype not in self.peak:
            raise ConfigError(
                f'accelerator "{self.name}" has no rate for "{dtype}": choose one of {", ".join(self.peak)}'
            )
        return self.peak[dtype] * self.share.get(dtype, 0.7)

    def product_s(self, flops: float, dtype: str) -> float:
        """The seconds of a matrix product."""
        return (flops + self.half_flops) / self.rate(dtype)

    def share_of_peak(self, flops: float, dtype: str) -> float:
        """The share of the peak that a product of so many FLOPs reaches.

        >>> Accelerator("A", 80 * 10**9, 2e12, {"fp16": 3e14}, {"fp16": 0.5}, half_flops=1e9).share_of_peak(1e9, "fp16")
        0.25
        """
        return flops / self.peak[dtype] / self.product_s(flops, dtype)

    def move_s(self, size: float) -> float:
        """The seconds of operations that read and write so many bytes."""
        return size / (self.bytes_per_s * self.memory_share)

    def attention_s(self, flops: float, dtype: str) -> float:
        """The seconds of fused attention: its products are in 16 bits, or wider if all are."""
        wide = dtype if dtype in ("fp32", "tf32") else "bf16" if "bf16" in self.peak else "fp16"
        return flops / (self.peak.get(wide, self.rate(dtype)) * self.attention_share)
