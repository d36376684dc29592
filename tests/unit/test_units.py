import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import FormatError
from weft.units import (
    BYTES,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("64MB", 64_000_000), (" 512 B ", 512), ("0.5KiB", 512), ("1e3B", 1000)],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("5us", 5e-6), ("1.5s", 1.5), ("10min", 600), ("2h", 7200)])
def test_durations(text, value):
    assert parse_seconds(text) == pytest.approx(value)


def test_rates():
    assert parse_rate("25GB/s") == 25e9


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "24", '"24" is not a size: write a number and a unit, for example "24GiB"'),
        (parse_bytes, "-1GB", '"-1GB" is not a size: write a number'),
        (parse_bytes, "24gib", 'its unit is "gib", known are B, KB, MB'),
        (parse_seconds, "5 minutes", 'its unit is "minutes", known are ns, us, ms, s, min, h'),
        (parse_rate, "25GB", '"25GB" is not a rate: its unit is "GB", known are B/s'),
    ],
)
def test_faults(parse, text, message):
    with pytest.raises(FormatError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(112 * 2**20), "112 MiB"),
        (format_bytes(-1536), "-1.5 KiB"),
        (format_bytes(3 * 2**50), "3072 TiB"),
        (format_seconds(0), "0 ns"),
        (format_seconds(0.00001234), "12.3 us"),
        (format_seconds(75), "75 s"),
    ],
)
def test_formats(text, expected):
    assert text == expected


@given(st.integers(1, 999), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_what_is_formatted_parses_back(number, unit):
    assert parse_bytes(format_bytes(number * BYTES[unit])) == number * BYTES[unit]
