"""Where the user wants modules: contexts, marks, and who wins."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import weft.torch as weft
from weft.errors import PlacementError
from weft.torch.split.by_hand import wishes
from weft.torch.tensors.marks import MARK


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        with weft.partition(1):
            self.b = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            with weft.partition(2):
                self.c = nn.Linear(2, 2)
            self.d = nn.Linear(2, 2)


def places(root: nn.Module, default: int = 0, partitions: int = 4) -> dict[str, int]:
    return wishes(root, default, partitions)


def test_the_innermost_context_counts_and_the_rest_goes_to_the_default():
    assert places(Net(), default=3) == {"": 3, "a": 3, "b": 1, "b.0": 1, "b.1": 1, "c": 2, "d": 1}


def test_a_context_around_a_whole_model_holds_for_what_it_does_not_place_itself():
    with weft.partition(3):
        net = Net()
    assert places(net) == {"": 3, "a": 3, "b": 1, "b.0": 1, "b.1": 1, "c": 2, "d": 1}


def test_modules_made_elsewhere_go_where_their_parent_goes():
    block = nn.Linear(2, 2)
    with weft.partition(1):
        net = nn.Sequential(block)
    assert places(net) == {"": 1, "0": 1}


def test_set_partition_wins_over_contexts_inside():
    net = Net()
    weft.set_partition(net, 3)
    assert set(places(net).values()) == {3}
    weft.set_partition(net.b[0], 2)
    weft.set_partition(net, 1)
    assert places(net)["b.0"] == 2, "set on its own, it stays"
    assert places(net)["b"] == places(net)["b.1"] == 1


def test_setting_again_replaces():
    net = nn.Linear(2, 2)
    weft.set_partition(net, 1)
    weft.set_partition(net, 0)
    assert places(net) == {"": 0}


def test_wishes_survive_copies():
    net = copy.deepcopy(Net())
    assert places(net)["c"] == 2
    weft.set_partition(net.c, 1)
    assert places(copy.deepcopy(net))["c"] == 1


def test_a_shared_module_keeps_its_first_place():
    shared = nn.Linear(2, 2)
    net = nn.Module()
    net.one, net.two = nn.Sequential(shared), nn.Sequential(shared)
    weft.set_partition(net.two, 1)
    assert places(net)["one.0"] == 0


def test_outside_of_contexts_modules_have_no_mark():
    original = nn.Module.__init__
    with weft.partition(1), weft.partition(2):
        pass
    assert nn.Module.__init__ is original
    assert MARK not in nn.Linear(2, 2).__dict__


def test_a_context_that_fails_is_left():
    original = nn.Module.__init__
    with pytest.raises(ValueError), weft.partition(1):
        raise ValueError
    assert nn.Module.__init__ is original


def test_the_state_dict_knows_nothing_of_it():
    assert set(Net().state_dict()) == {f"{n}.{p}" for n in ("a", "b.0", "c", "d") for p in ("weight", "bias")}


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, True, 1.0, "0", None])
def test_an_index_is_a_whole_number(index: Any):
    with pytest.raises(PlacementError, match=f"a partition is a whole number from 0, not {index!r}"):
        weft.set_partition(nn.Linear(2, 2), index)
    with pytest.raises(PlacementError, match="a partition is a whole number from 0"), weft.partition(index):
        pass


def test_every_index_that_is_too_large_is_told():
    with pytest.raises(PlacementError) as caught:
        places(Net(), partitions=1)
    assert str(caught.value) == (
        "b was put on partition 1; b.0 was put on partition 1; b.1 was put on partition 1; c was put on "
        "partition 2; d was put on partition 1, but there are 1 partitions (0 to 0): raise the setting "
        '"partitions" or choose another index'
    )
    net = nn.Linear(2, 2)
    weft.set_partition(net, 7)
    with pytest.raises(PlacementError, match="the model was put on partition 7, but there are 2 partitions"):
        places(net, partitions=2)
