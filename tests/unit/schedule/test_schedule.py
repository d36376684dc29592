"""Actions and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import FormatError
from weft.schedule.schedule import KINDS, Action, in_flight

actions = st.builds(Action, st.integers(0, 99), st.sampled_from(list(KINDS)), st.integers(0, 999))


@given(actions)
def test_text_parses_back(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-2F0", "2F0 1B0", "2f0"])
def test_what_is_no_action(text):
    with pytest.raises(
        FormatError, match=r'is not an action: write stage, kind and microbatch, for example "2F0"'
    ):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "peak", "weighted"),
    [
        ("", 0, 0),
        ("0F0 0B0 0F1 0B1", 1, 3),
        ("0F0 0F1 0B0 0B1", 2, 6),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 2, 6),
        ("0F0 1F0 1B0 0B0", 2, 8),
        ("0F0 1F0 1B0 0F1 0B0 0B1", 2, 8),
        ("0F0 0SEND_F0 0RECV_B0 0B0", 1, 3),
    ],
)
def test_in_flight(text, peak, weighted):
    actions = [Action.parse(part) for part in text.split()]
    assert in_flight(actions) == peak
    assert in_flight(actions, weights=[3, 5]) == weighted
