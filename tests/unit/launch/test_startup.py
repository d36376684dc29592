"""Ranks compare how they were started; threads stand for processes, one in-process store between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta

import pytest

from weft.errors import DivergenceError, LaunchError
from weft.launch.discovery import Place
from weft.launch.startup import agree, first_difference

torch_distributed = pytest.importorskip("torch.distributed")


def agree_all(
    digests: Mapping[int, Mapping[str, str]], ranks: int, seconds: float = 20
) -> dict[int, Exception]:
    """What each rank raised; ranks without digests do not show up."""
    store = torch_distributed.HashStore()
    raised: dict[int, Exception] = {}

    def one(rank: int) -> None:
        try:
            agree(store, Place(rank, ranks, rank, ranks, "weft"), digests[rank], timedelta(seconds=seconds))
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_equal_ranks_agree():
    assert agree_all({rank: {"weft": "1", "settings": "{}"} for rank in range(3)}, 3) == {}


def test_one_process_needs_nobody():
    agree(None, Place(), {"weft": "1"}, timedelta(seconds=1))


def test_different_ranks_all_get_the_same_message():
    raised = agree_all({0: {"weft": "1"}, 1: {"weft": "2"}, 2: {"weft": "1"}}, 3)
    assert set(raised) == {0, 1, 2}
    assert {type(error) for error in raised.values()} == {DivergenceError}
    assert {str(error) for error in raised.values()} == {
        "the ranks were started differently: weft is 1 on rank 0, 2 but 2 on rank 1"
    }


def test_ranks_that_do_not_show_up_are_named():
    raised = agree_all({0: {"weft": "1"}, 2: {"weft": "1"}}, 4, seconds=0.3)
    assert {str(error) for error in raised.values()} == {
        "2 of 4 ranks started in time; missing: rank 1, 3",
    }
    assert {type(error) for error in raised.values()} == {LaunchError}


def test_a_rank_without_rank_0_gives_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.launch.startup._SPARE_SECONDS", 0.2)
    raised = agree_all({1: {"weft": "1"}}, 2, seconds=0.2)
    assert str(raised[1]) == "rank 1 heard nothing from rank 0 in 0.2 s"


def test_a_broken_store_is_a_launch_error():
    class Broken:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    with pytest.raises(LaunchError, match="rank 1 lost rank 0 while the job was starting: Broken pipe"):
        agree(Broken(), Place(1, 2, 1, 2, "weft"), {}, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({0: {"a": "1"}, 1: {"a": "1"}}, ""),
        ({0: {"a": "1"}, 1: {}}, "a is 1 on rank 0 but missing on rank 1"),
        ({0: {"a": '{"x": 1}'}, 1: {"a": '{"x": 1, "y": 2}'}}, "a.y is missing on rank 0 but 2 on rank 1"),
        ({0: {"a": '{"x": 1}'}, 1: {"a": "[1]"}}, 'a is {"x": 1} on rank 0 but [1] on rank 1'),
        ({0: {"a": "1", "b": "1"}, 1: {"a": "1", "b": "2"}}, "b is 1 on rank 0 but 2 on rank 1"),
        ({0: {"a": "x" * 300}, 1: {"a": "y"}}, f"a is {'x' * 200}... on rank 0 but y on rank 1"),
    ],
)
def test_the_first_difference(shown: dict[int, dict[str, str]], text: str):
    found = first_difference(shown)
    assert found == (f"the ranks were started differently: {text}" if text else "")
