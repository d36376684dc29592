"""Functions that lose arguments on the way to tensors of other classes give what they give for plain tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.torch.pytorch.lost_arguments import REPLACED

FUNCTIONS = {old.__name__: new for old, new in REPLACED}


class Seen(Tensor):
    """A tensor of another class."""


def other(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Seen)


@pytest.mark.parametrize(
    "how",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"reduce": False}, {"size_average": False}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_the_weight_of_l1_loss_counts(how: dict[str, Any]) -> None:
    x, y, weight = torch.rand(3, 4, 5)
    found = FUNCTIONS["l1_loss"](other(x), y, weight=weight, **how)
    assert type(found) is Seen
    torch.testing.assert_close(
        found.as_subclass(Tensor), torch.nn.functional.l1_loss(x, y, weight=weight, **how)
    )
    with pytest.raises(ValueError, match="same size"):
        FUNCTIONS["l1_loss"](other(x), y, weight=weight[0], **how)
    torch.testing.assert_close(
        FUNCTIONS["l1_loss"](other(x), y, **how).as_subclass(Tensor), torch.nn.functional.l1_loss(x, y, **how)
    )


def test_chain_matmul_writes_where_it_is_told() -> None:
    some, into = [torch.rand(4, 4) for _ in range(3)], torch.zeros(4, 4)
    FUNCTIONS["chain_matmul"](other(some[0]), *some[1:], out=into)
    torch.testing.assert_close(into, torch.linalg.multi_dot(some))


def test_all_that_lose_arguments_are_known() -> None:
    """Of the functions in Python that hand their arguments on."""
    files = [torch.functional.__file__, torch.nn.functional.__file__, torch.nn.init.__file__]
    assert {name for file in files for name in losing(Path(file))} <= FUNCTIONS.keys()


def losing(file: Path) -> Iterator[str]:
    """The functions of a file that hand on less than they get."""
    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {each.arg for each in (*function.args.args, *function.args.kwonlyargs) if each.arg[0] != "_"}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "handle_torch_function":
                handed = [*call.args[2:], *(each.value for each in call.keywords)]
                if names - {
                    each.id for one in handed for each in ast.walk(one) if isinstance(each, ast.Name)
                }:
                    yield function.name
