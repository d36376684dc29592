"""``import torch.sagemaker`` where weft's names are on, and what its refused names say."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from tests.unit.compat.test_names import python
from weft.compat.refused import MissingPart
from weft.compat.torch_sagemaker import names

FIND = "import importlib.util as u; print(u.find_spec('torch.sagemaker') is not None)"


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    names.install()
    yield
    for name in [name for name in sys.modules if name.startswith(names.ROOT)]:
        del sys.modules[name]


def test_the_modules_are_there_only_for_who_asks():
    assert python(FIND) == ["False"]
    first = "import torch.sagemaker as tsm; print(tsm.__name__)"
    assert python(f"import weft.compat; weft.compat.enable(); {first}; {FIND}") == ["torch.sagemaker", "True"]
    assert python(f"import torch, weft.compat; weft.compat.enable(); {first}") == ["torch.sagemaker"]


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in names.MISSING for name in names.MISSING[module]]
)
def test_a_refused_name_says_what_to_write_in_its_place(found, module, name):
    told = f"torch.sagemaker.{module}.{name} is not supported: "
    if module in names.AT_IMPORT:
        with pytest.raises(ImportError, match=told):
            getattr(importlib.import_module(f"torch.sagemaker.{module}"), name)
        return
    part = getattr(importlib.import_module(f"torch.sagemaker.{module}"), name)
    assert not isinstance(3, part)
    for use in (lambda: part(), lambda: part.forward, lambda: type("Mine", (part,), {})()):
        with pytest.raises(MissingPart, match=told):
            use()


def test_modules_and_names_that_nobody_knows(found):
    import torch.sagemaker as tsm

    with pytest.raises(
        ImportError, match=r"weft has no module torch\.sagemaker\.unknown: docs/migration\.md"
    ):
        importlib.import_module("torch.sagemaker.unknown")
    with pytest.raises(
        AttributeError, match=r"'torch\.sagemaker' has no attribute 'unknown'.*docs/migration\.md"
    ):
        getattr(tsm, "unknown")  # noqa: B009
    assert not hasattr(tsm.nn.attn, "unknown")
