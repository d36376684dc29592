"""The speeds of a pipeline's ranks beside each other, measured while all of them compute at once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

import torch

from weft.torch.session.collectives import gather_texts
from weft.torch.session.session import Session

log = logging.getLogger("weft")

WIDTH = 512
MEASURE_S = 0.3
ROUNDS = 3
"""The best of so many rounds counts: other work comes and goes."""
ALIKE = 0.1
"""Ranks are alike if the slowest takes at most this part more than the fastest."""


def measure_speeds(session: Session) -> str:
    """The setting ``devices`` that the ranks have been measured to need; collective over all ranks.

    Of the replicas' ranks with the same partition the slowest counts, as a step waits for it.
    """
    if session.rehearsal is not None:
        return "alike"
    with session.doing("the measurement of the ranks' speeds"):
        gather_texts("", session.group("world"))  # all begin together
        texts = gather_texts(json.dumps(_products_per_s(session.device)), session.group("world"))
    rates: list[float] = [json.loads(text) for text in texts]
    by_partition = [0.0] * session.mesh.pp
    for rank, rate in enumerate(rates):
        at = session.mesh.position("pp", rank)
        by_partition[at] = min(by_partition[at] or rate, rate)
    answer = as_setting(by_partition)
    if session.rank == 0:
        log.info("devices: %s", answer)
    return answer


def as_setting(rates: Sequence[float]) -> str:
    """Rates as the setting has them.

    >>> as_setting([100.0, 95.0]), as_setting([100.0, 50.0, 100.0])
    ('alike', '1.000, 0.500, 1.000')
    """
    most = max(rates)
    if min(rates) >= most / (1 + ALIKE):
        return "alike"
    return ", ".join(f"{rate / most:.3f}" for rate in rates)


def _products_per_s(device: torch.device) -> float:
    """Matrix products in a second of this rank."""
    left, right = torch.ones(WIDTH, WIDTH, device=device), torch.ones(WIDTH, WIDTH, device=device)
    best = 0.0
    for _ in range(ROUNDS):
        count, start_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - start_s) < MEASURE_S / ROUNDS:
            for _ in range(4):
                torch.mm(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            count += 4
        best = max(best, count / took_s)
    return best
