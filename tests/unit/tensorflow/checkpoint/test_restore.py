"""Saves that do not fit the script, and what waits for the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from weft.checkpoint.index import Entry, Index  # noqa: E402
from weft.tensorflow.checkpoint.contents import Contents  # noqa: E402
from weft.tensorflow.checkpoint.restore import find_misfits, when_known  # noqa: E402
from weft.tensorflow.checkpoint.tensor_files import ShardReader  # noqa: E402
from weft.torch.checkpoint import restore as restore_torch  # noqa: E402


def entry(shape: tuple[int, ...], dtype: str = "float32") -> Entry:
    return Entry("rank-0000.safetensors", dtype, shape, 0, 0, 0)


TENSORS = {
    "model/a/kernel": entry((2, 3)), "model/a/bias": entry((3,)), "variables/step": entry((), "int64"),
    "optimizer@0/iteration": entry((), "int64"),
}  # fmt: skip
CONTENT = {
    "framework": "tensorflow", "names": {"model": ["a/kernel", "a/bias"]}, "optimizers": {"optimizer": "Adam"},
    "optimizer_values": {},
}  # fmt: skip


def misfits(contents: Contents, strict: bool = True, content: Any = None) -> list[str]:
    index = Index("a", 1, {}, TENSORS, CONTENT if content is None else content)
    return find_misfits(ShardReader(Path("saves"), index), contents, strict, ())


def with_model(*variables: Any, **rest: Any) -> Contents:
    model = SimpleNamespace(all_variables=lambda: list(variables))
    return Contents({"model": model}, rest.get("optimizers", {}), rest.get("variables", {}))


def named(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return tf.Variable(tf.zeros(shape, dtype), name=name)


def test_what_fits_has_no_faults():
    contents = with_model(
        named("a/kernel", (2, 3)), named("a/bias", (3,)),
        optimizers={"optimizer": keras.optimizers.Adam()}, variables={"step": named("step", (), "int64")},
    )  # fmt: skip
    assert misfits(contents) == []


def test_all_faults_are_told_at_once():
    contents = with_model(
        named("a/kernel", (3, 2)), named("b", (1,)),
        optimizers={"optimizer": keras.optimizers.SGD()},
        variables={"step": named("step", (), "float32"), "epoch": named("epoch", ())},
    )  # fmt: skip
    assert misfits(contents) == [
        "b is missing",
        "a/bias is not part of the model",
        "model/a/kernel has the shape [2, 3], the script needs [3, 2]",
        "there is no variable epoch",
        "variables/step holds int64, the script needs float32",
        "the optimizer was a Adam, the script has a SGD",
    ]


def test_names_that_differ_are_left_out_where_that_is_asked_for():
    assert misfits(with_model(named("a/kernel", (2, 3)), named("b", (1,))), strict=False) == []


def test_a_model_that_has_no_variables_yet():
    told = "a/bias, a/kernel is not part of the model (its variables do not exist before the first step: resume after"
    assert misfits(with_model()) == misfits(with_model(), strict=False) == [f"{told} that)"]


def test_things_that_were_not_saved():
    assert misfits(Contents({}, {"optimizer-a": keras.optimizers.Adam()}, {})) == ["there is no optimizer-a"]


def test_a_save_of_the_other_framework_is_refused_on_both_sides():
    assert misfits(with_model(), content={"names": {}}) == ["it was saved by weft.torch: resume it there"]
    wanted = restore_torch.Wanted(None, None, {}, True, True, False)
    index = Index("a", 1, {}, TENSORS, CONTENT)
    told = restore_torch._find_misfits(None, index, wanted)
    assert told == ["it was saved by weft.tensorflow: resume it there"]


class Waiting:
    """A model whose partition may be told later."""

    def __init__(self) -> None:
        self.partitioned = False
        self.waiting: list[Any] = []

    def when_partitioned(self, act: Any) -> None:
        self.waiting.append(act)

    def finish(self) -> None:
        self.partitioned = True
        for act in self.waiting:
            act()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_waits_comes_after_the_last_model(order):
    models, done = [Waiting(), Waiting()], []
    joined: Any = SimpleNamespace(settings=SimpleNamespace(partitions=2))
    when_known(joined, models, lambda: done.append(1))
    models[order[0]].finish()
    assert not done
    models[order[1]].finish()
    assert done == [1]
    when_known(joined, models, lambda: done.append(2))
    joined.settings.partitions = 1
    when_known(joined, [Waiting()], lambda: done.append(3))
    assert done == [1, 2, 3]
