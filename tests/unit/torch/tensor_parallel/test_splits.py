"""What was found, as a value and as a text."""

from __future__ import annotations

import json

import pytest

from weft.errors import FormatError
from weft.torch.tensor_parallel import Linear, Region, Splits

FOUND = Splits(
    2,
    tuple(
        Region(
            f"h.{layer}.attn",
            {
                f"h.{layer}.attn.c_attn": Linear("column", (32, 16, 16)),
                f"h.{layer}.attn.c_proj": Linear("row"),
            },
        )
        for layer in range(3)
    ),
    {"head": "cross_entropy takes the whole"},
)


def test_a_record_is_json_and_comes_back():
    assert Splits.from_record(json.loads(json.dumps(FOUND.to_record()))) == FOUND


@pytest.mark.parametrize(
    "record",
    [None, {}, {"size": 2, "regions": [{"name": "a", "linears": {"b": ["diagonal", []]}}], "whole": {}},
     {"size": 2, "regions": [], "whole": []}, {"size": "two", "regions": [], "whole": {}}],
)  # fmt: skip
def test_other_records_are_refused(record: object):
    with pytest.raises(FormatError, match="no record of what is split over axis tp"):
        Splits.from_record(record)


def test_layers_alike_are_one_line():
    assert FOUND.text() == "\n".join(
        [
            "linears over the 2 ranks of axis tp",
            "  h.*.attn.c_attn    3  column-parallel, 3 blocks of 32, 16",
            "  h.*.attn.c_proj    3  row-parallel",
            "  head               1  whole: cross_entropy takes the whole",
        ]
    )


def test_a_model_without_linears():
    assert Splits(4).text() == "axis tp (4 ranks): the model has no linears"
