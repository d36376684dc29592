"""Where units go: what the settings ask of a placement."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("tensorflow")

from tests.unit.tensorflow.steps import Writer  # noqa: E402
from weft.config import Settings  # noqa: E402
from weft.errors import ConfigError  # noqa: E402
from weft.tensorflow.join import _check  # noqa: E402
from weft.tensorflow.split.decide import decide  # noqa: E402
from weft.tensorflow.split.units import make_units  # noqa: E402


def units_of(layers, shared=None):
    """A chain of layers, each with a variable; ``shared``: (a layer that uses the variable of another, the other)."""
    step = Writer()
    variables = [step.variable(f"layer{n}") for n in range(layers)]
    value = step.argument()
    for n in range(layers):
        one = shared[1] if shared and n == shared[0] else n
        value = step.add(value, reads=[variables[one]], unit=f"model0/layer{n}", work_s=1e-3)
    return make_units(step.record({value: frozenset()}))


def goes_back(units, partitions):
    """Whether something goes to a partition before the one that made it."""
    return any(
        partitions[target] < partitions[source]
        for source, targets, _ in units.graph.flows
        for target in targets
    )


def placed(units, **settings):
    settings = Settings(partitions=2, microbatches=4, **settings)
    return decide(settings, units, {}, 4)


def test_contiguous_keeps_out_what_visits_a_partition_twice(monkeypatch):
    units = units_of(4)
    zigzag = (0, 1, 0, 1)
    monkeypatch.setattr(
        "weft.tensorflow.split.decide.metis.load", lambda: lambda *args, **kwargs: list(zigzag)
    )
    asked = []
    monkeypatch.setattr(
        "weft.tensorflow.split.decide._best",
        lambda settings, units, found, *rest: asked.append([each.partitions for each in found]),
    )
    for contiguous in (False, True):
        placed(units, contiguous=contiguous)
    free, contiguous = asked
    assert any(goes_back(units, each) for each in free), free
    assert contiguous and not any(goes_back(units, each) for each in contiguous), contiguous


def test_contiguous_gives_way_where_units_must_be_together(caplog):
    units = units_of(5, shared=(4, 0))
    with caplog.at_level(logging.WARNING, "weft"):
        decision = placed(units, contiguous=True)
    assert {*decision.partitions} == {0, 1} and goes_back(units, decision.partitions)
    assert "keep each partition from being one run of the model" in caplog.text


def test_contiguous_and_several_visits_exclude_each_other():
    with pytest.raises(
        ConfigError, match='contiguous is true, and with pipeline "interleaved_1f1b" a microbatch visits'
    ):
        _check(Settings(partitions=2, pipeline="interleaved_1f1b", contiguous=True))
