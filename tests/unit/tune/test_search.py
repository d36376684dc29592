"""What is tried, in which order, and that the best is never worse than the script's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.tune.search import GAIN, Outcome, Tuning, tune


class Script:
    """Stands in for a script: its rate by settings; what it lacks fails."""

    def __init__(
        self, rates: Mapping[tuple[Any, ...], float], degrees: tuple[int, ...] = (), **own: Any
    ) -> None:
        self.rates, self.degrees, self.own = rates, degrees, own
        self.ran: list[dict[str, Any]] = []
        self.floors: list[float] = []

    def __call__(self, changes: Mapping[str, Any], floor: float) -> Outcome:
        settings = {**self.own, **changes}
        self.ran.append(dict(changes))
        self.floors.append(floor)
        rate = self.rates.get(tuple(settings[name] for name in sorted(settings)))
        failure = "" if rate else "it does not divide"
        return Outcome(rate, 10, 0.1, settings=settings, failure=failure, degrees=self.degrees)


def tuned(script: Script, turns: int = 2, **choices: Any) -> Tuning:
    found = Tuning()
    assert all(known is found for known in tune(script, choices, turns, found))
    return found


def by_microbatches(**rates: float) -> dict[tuple[Any, ...], float]:
    return {(int(name[1:]),): rate for name, rate in rates.items()}


def test_microbatches_grow_for_as_long_as_it_gains():
    script = Script(by_microbatches(m2=100.0, m4=150.0, m8=190.0, m16=180.0, m1=500.0), microbatches=2)
    found = tuned(script)
    assert [trial.changes.get("microbatches", 2) for trial in found.trials] == [2, 4, 8, 16], (
        "what grew is not halved below what it was"
    )
    assert found.best.changes == {"microbatches": 8} and round(found.gain, 6) == 0.9
    assert script.ran[-4:] == [{}, {"microbatches": 8}] * 2, "at the end in turn"
    assert script.floors[1] == 70.0 and script.floors[3] == 0.7 * 190


def test_microbatches_shrink_where_more_do_not_gain():
    found = tuned(Script(by_microbatches(m8=100.0, m4=110.0, m2=130.0, m1=120.0), microbatches=8))
    assert [trial.changes.get("microbatches", 8) for trial in found.trials] == [8, 16, 4, 2, 1]
    assert found.best.changes == {"microbatches": 2}
    assert found.trials[1].outcome.failure == "it does not divide"


def test_choices_are_tried_with_the_best_so_far_and_microbatches_once_more():
    rates = {
        (2, 2, "1f1b"): 100.0, (4, 2, "1f1b"): 101.0, (1, 2, "1f1b"): 50.0,
        (2, 2, "auto"): 150.0, (4, 2, "auto"): 200.0, (8, 2, "auto"): 190.0,
    }  # fmt: skip
    found = tuned(Script(rates, microbatches=2, partitions=2, pipeline="1f1b"))
    assert found.best.changes == {"pipeline": "auto", "microbatches": 4} and found.gain == 1.0


def test_named_values_are_tried_and_no_others():
    script = Script(by_microbatches(m2=100.0, m3=50.0, m6=300.0), microbatches=2)
    found = tuned(script, microbatches=[3, 2, 6])
    assert [trial.changes.get("microbatches", 2) for trial in found.trials] == [2, 3, 6]
    assert found.best.changes == {"microbatches": 6}


def test_degrees_of_tensor_parallelism_grow_with_samples_of_their_own():
    """Ranks that split weights read other samples, so that the batch stays what it was."""
    rates = {
        ("equal", 2, 1): 100.0, ("equal", 4, 1): 100.0, ("equal", 1, 1): 100.0,
        ("per_rank", 2, 2): 150.0, ("per_rank", 2, 4): 190.0, ("per_rank", 2, 8): 180.0, ("per_rank", 4, 4): 200.0,
        ("per_rank", 8, 4): 150.0,
    }  # fmt: skip
    own = {"inputs": "equal", "microbatches": 2, "tensor_parallel_degree": 1}
    script = Script(rates, degrees=(1, 2, 4, 8), **own)
    found = tuned(script)
    tried = [trial.changes.get("tensor_parallel_degree", 1) for trial in found.trials]
    assert tried == [1, 1, 1, 2, 4, 8, 4, 4]
    assert found.best.changes == {"tensor_parallel_degree": 4, "inputs": "per_rank", "microbatches": 4}
    named = tuned(Script(rates, degrees=(1, 2, 4, 8), **own), tensor_parallel_degree=[1])
    assert len(named.trials) == 3, "who names degrees gets those"


def test_degrees_shrink_where_more_do_not_gain():
    rates = {("per_rank", 4): 100.0, ("per_rank", 8): 90.0, ("per_rank", 2): 120.0, ("per_rank", 1): 110.0}
    found = tuned(Script(rates, degrees=(1, 2, 4, 8), inputs="per_rank", tensor_parallel_degree=4))
    assert [trial.changes.get("tensor_parallel_degree", 4) for trial in found.trials] == [4, 8, 2, 1]
    assert found.best.changes == {"tensor_parallel_degree": 2}


def test_what_looked_faster_must_be_so_again():
    rates = iter([100.0, 150.0, 100.0, 100.0, 101.0, 100.0, 101.0])
    found = tuned(lambda changes, floor: Outcome(next(rates), 10, 0.1, settings={"microbatches": 1}))  # type: ignore[arg-type]
    assert found.fastest.changes and found.best is found.own and round(found.gain, 6) == 0.01


def test_a_script_that_fails_by_itself_gets_what_runs():
    found = tuned(Script(by_microbatches(m4=80.0), microbatches=2))
    assert not found.own.rate and found.best.changes == {"microbatches": 4} and found.repeats == []
    nothing = tuned(Script({}, microbatches=2))
    assert nothing.best is nothing.own and not nothing.best.rate


@given(
    st.dictionaries(st.integers(0, 12).map(lambda power: 2**power), st.floats(1, 1000), min_size=1),
    st.integers(0, 12).map(lambda power: 2**power),
)
def test_the_best_is_never_worse_than_the_script_s_own(rates: dict[int, float], own: int):
    found = tuned(Script({(number,): rate for number, rate in rates.items()}, microbatches=own))
    assert found.best.rate >= found.own.rate
    if found.best is not found.own and found.own.rate:
        assert found.best.rate > found.own.rate * (1 + GAIN)
