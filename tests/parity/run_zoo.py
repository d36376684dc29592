"""Worker: trains cases of the zoo split over its ranks and compares with one process.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/run_zoo.py GPT2LMHeadModel T5ForConditionalGeneration
"""

from __future__ import annotations

import logging
from typing import Any

import weft.torch as weft
from tests.parity.compare import Comparison, first_names
from tests.parity.split import train_split
from tests.parity.worker import arguments, work
from tests.parity.zoo import CASES
from tests.parity.zoo.case import MICROBATCHES


def run_case(name: str, partitions: int) -> tuple[str, dict[str, Any]]:
    """Three steps alone, three steps split, and what differs."""
    case = CASES[name]
    net, expected = case.trained_alone()
    whole = sum(value.numel() for value in net.parameters())
    told: list[str] = []
    log, handler = logging.getLogger("weft"), _Told(told)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    weft.init({"partitions": partitions, "microbatches": MICROBATCHES})
    every = sorted(set(first_names(net).values()))
    actual = train_split(net, case.batches(), case.loss_of, case.optimizer_for)
    log.removeHandler(handler)
    comparison = Comparison()
    comparison.record(actual, expected)
    owned = sorted(actual.parameters)
    if partitions > 1 and len(owned) == len(every):
        comparison.fail("partition", f"this rank owns all {len(owned)} parameters")
    more = {**comparison.summary(), "owned": owned, "every": every}
    here = dict(net.named_parameters())
    more["held"] = sum(here[name].numel() for name in owned if name in here) / whole
    more["verified"] = [text for text in told if text.startswith("verify: ")]
    return comparison.report(), more


class _Told(logging.Handler):
    """Keeps what the log says."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.INFO)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


if __name__ == "__main__":
    work(arguments(list(CASES)), run_case)
