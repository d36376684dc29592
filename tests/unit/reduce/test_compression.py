"""Compressions by name, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from weft.errors import ConfigError, UsageError
from weft.reduce.collective import Direct
from weft.reduce.compression import NAMES, make
from weft.reduce.compression.compressors import topk


@pytest.mark.parametrize(
    "spec", [*NAMES, "int8:block=128,rounding=stochastic", "fp16+topk:ratio=0.1", "bf16 + int8"]
)
def test_a_text_makes_a_pair(spec: str):
    init, update = make(spec)
    assert callable(init) and callable(update)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("int4", "there is no compression 'int4': choose one of fp16, bf16, int8, topk, powersgd"),
        ("", "there is no compression '': choose one of"),
        ("int8:size=3", "int8 has no option 'size': it has block, rounding, feedback"),
        ("fp16:block=3", "fp16 has no option 'block': it has none"),
        ("int8:block=0", "int8's option block is '0', and has to be a whole number of at least 1"),
        ("int8:rounding=up", "int8's option rounding is 'up', and has to be nearest or stochastic"),
        ("int8:feedback=yes", "int8's option feedback is 'yes', and has to be true or false"),
        ("topk:ratio=x", "topk's option ratio is 'x', and has to be above 0 and at most 1"),
        ("powersgd:start=1", "powersgd's option start is '1', and has to be a whole number of at least 2"),
        ("int8+fp16", "int8 sends messages of its own, so nothing can follow it: put it last"),
    ],
)
def test_what_cannot_be_made_is_told(spec: str, text: str):
    with pytest.raises(ConfigError) as caught:
        make(spec)
    assert text in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError, match="no compression 'int4'.*ratio is '2'"):
        make("int4+topk:ratio=2")


def test_whole_numbers_are_not_compressed():
    with pytest.raises(UsageError, match="gradients of torch.int64 cannot be compressed"):
        make("int8").init(3, torch.int64, torch.device("cpu"), 2)


def test_after_an_overflow_topk_sends_gradients_again(world: dist.ProcessGroup):
    init, update = topk(0.5)
    state = init(2, torch.float16, torch.device("cpu"), 1)

    def sent(*values: float) -> list[float]:
        return update(state, torch.tensor(values, dtype=torch.float16), Direct(world)).tolist()

    assert sent(float("inf"), 1.0) == [float("inf"), 0.0]
    assert sent(3.0, 1.0) == [3.0, 0.0]
    assert sent(0.0, 0.0) == [0.0, 2.0]
