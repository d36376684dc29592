"""Weights that something else than an optimizer has written; see ``weft.torch.agreement.written``."""

from __future__ import annotations

import torch

from weft.torch.agreement.written import Written


def test_a_tensor_that_the_script_writes_is_found_once():
    weight = torch.zeros(3)
    written = Written()
    written.begin_anew([weight])
    assert written.take([{"weight": weight}]) == {}
    weight.fill_(1.0)
    assert [*written.take([{"weight": weight}])] == ["weight"]
    assert written.take([{"weight": weight}]) == {}


def test_a_tensor_with_the_id_of_a_freed_one_that_was_written_is_not_found():
    master = torch.zeros(3)
    written, freed = Written(), id(master)
    written.note([master])
    master.fill_(1.0)
    written.look([master])
    del master
    others = [torch.zeros(3)]
    while id(others[-1]) != freed:
        assert len(others) < 100_000, "no tensor got the freed id"
        others.append(torch.zeros(3))
    assert written.take([{"weight": others[-1]}]) == {}
