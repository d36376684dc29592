"""Worker: trains cases of the zoo split over its ranks and compares with one process.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/run_zoo.py GPT2LMHeadModel T5ForConditionalGeneration
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import weft.torch as weft
from tests.parity.compare import Comparison, first_names, train_alone
from tests.parity.split import train_split
from tests.parity.worker import BeforeSplit, arguments, work
from tests.parity.zoo import CASES
from tests.parity.zoo.case import MICROBATCHES, STEPS


def run_case(name: str, partitions: int) -> tuple[str, dict[str, Any]]:
    """Three steps alone, three steps split, and what differs."""
    case = CASES[name]
    batches = [case.batch(step) for step in range(STEPS)]

    def loss_of(model: Any, batch: dict[str, Any]) -> Any:
        return case.loss(model(**batch, **case.options))

    try:
        net = case.build()
        alone = copy.deepcopy(net)
        optimizer = case.optimizer_for(alone.parameters())
        expected = train_alone(alone, batches, loss_of, optimizer, MICROBATCHES)
    except Exception as broken:
        raise BeforeSplit(f"not trained in one process: {broken!r}") from broken
    told: list[str] = []
    log, handler = logging.getLogger("weft"), _Told(told)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    weft.init({"partitions": partitions, "microbatches": MICROBATCHES})
    every = sorted(set(first_names(net).values()))
    actual = train_split(net, batches, loss_of, case.optimizer_for)
    log.removeHandler(handler)
    comparison = Comparison()
    comparison.record(actual, expected)
    owned = sorted(actual.parameters)
    if partitions > 1 and len(owned) == len(every):
        comparison.fail("partition", f"this rank owns all {len(owned)} parameters")
    worst = max(comparison.worst.items(), key=lambda item: item[1][0])
    more = {"worst": worst[1][0], "where": f"{worst[0]}: {worst[1][1]}", "owned": owned, "every": every}
    here = dict(net.named_parameters())
    whole = sum(value.numel() for value in alone.parameters())
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
