"""`"microbatches": "auto"` with one partition: the fewest that fit, and what trains is what the same number trains."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launching import run_ranks
from tests.long import one_in
from weft.plan.measured.microbatches import Line, Resident, fewest

SCRIPT = """\
import copy
import json
import logging
import sys
import torch
import weft.torch as weft
from weft.torch.session.current import session

limit, how = float(sys.argv[1]), sys.argv[2]
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
torch.manual_seed(0)
WIDTH, ROWS = 64, 48
net = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.BatchNorm1d(4 * WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.2),
    torch.nn.Linear(4 * WIDTH, WIDTH),
)
if how == "compiled":
    net = torch.compile(net)
weft.init({})
x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(weft.rank()))


def trained(microbatches, **settings):
    torch.manual_seed(3)
    weft.init({"microbatches": microbatches, **settings})
    model = weft.DistributedModel(copy.deepcopy(net))
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @weft.step
    def step(model, x):
        if how == "whole" and len(x) != ROWS:
            raise ValueError(f"{ROWS} rows, no other number")
        loss = (model(x) - x).square().mean()
        if torch.is_grad_enabled():
            loss.backward() if how == "plain" else model.backward(loss)
        return loss

    if how == "evaluation":
        with torch.no_grad():
            step(model.eval(), x)
        model.train()
        assert session().settings.microbatches in (microbatches, "auto")
    outputs = [step(model, x + number) for number in range(2)]
    optimizer.step()
    state = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    return len(outputs[0].outputs), state


limits = {"memory_limit": limit} if limit else {}
number, state = trained("auto", **limits)
by_hand = trained(number, **limits)
assert state == by_hand[1], (state, by_hand)
if weft.rank() == 0:
    print(json.dumps({"number": number}))
weft.shutdown()
"""


def taken(limit_gib: float, how: str = "usual", ranks: int = 1) -> tuple[int, str]:
    """The number of microbatches, and what was logged of it."""
    done = run_ranks(ranks, SCRIPT, [str(limit_gib), how], warm=True)
    assert done.returncode == 0, done.stderr
    reasons = next(line for line in done.stderr.splitlines() if "microbatches: " in line)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))[
        "number"
    ], reasons


@pytest.mark.parametrize(
    ("limit_gib", "ranks", "how", "number", "said"),
    one_in(
        2,
        [
            (0.0, 1, "usual", 1, "microbatches: 1 of 48 samples, the fewest that fit"),
            (0.0006, 1, "usual", 3, "microbatches: 3 of 16 samples, the fewest that fit: a rank takes"),
            (0.0006, 2, "plain", 3, "microbatches: 3 of 16 samples, the fewest that fit: a rank takes"),
            (0.0006, 1, "evaluation", 3, "microbatches: 3 of 16 samples, the fewest that fit: a rank takes"),
            (1e-5, 1, "usual", 24, "which is too much all the same"),
            (
                0.0006,
                1,
                "compiled",
                1,
                "microbatches: 1, because a module is compiled, so that what it takes",
            ),
            (
                0.0006,
                1,
                "whole",
                1,
                "microbatches: 1, because its loss joins all rows of the mini-batch",
            ),
        ],
    ),
)
def test_the_fewest_that_fit_train_as_that_number_by_hand(limit_gib, ranks, how, number, said):
    found, reasons = taken(limit_gib, how, ranks)
    assert found == number and said in reasons, reasons


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 100), st.integers(1, 100_000), st.booleans(),
)  # fmt: skip
def test_no_smaller_number_fits(samples, lasting, fixed, each, limit, uneven):
    ranks = [Resident(one, lasting, Line(fixed, each), limit) for one in samples]
    number, reasons, fits = fewest(ranks, uneven)
    need = {one: max(rank.needs(one) for rank in ranks) for one in range(1, number + 1)}
    assert fits is (need[number] <= limit) and f"microbatches: {number} of" in reasons
    assert uneven or all(one % number == 0 for one in samples)
    assert number == 1 or need[1] > limit
    assert [Resident.from_record(json.loads(json.dumps(rank.to_record()))) for rank in ranks] == ranks
