import pytest

from weft.errors import UsageError
from weft.report.text import PlacementRow, placement_table, table


def test_columns_are_as_wide_as_their_widest_cell():
    assert table(["a", "long"], [["xyz", 1], ["", 22]], "<>") == "a    long\n---  ----\nxyz     1\n       22"


def test_no_rows():
    assert table(["a", "b"], []) == "a  b\n-  -"


def test_rows_must_fit():
    with pytest.raises(UsageError, match=r"row 1 has 1 cells, the table has 2 columns: \['x'\]"):
        table(["a", "b"], [[1, 2], ["x"]])


def test_placement():
    rows = [
        ("wte", 1, 1000, 4096, 0.5, 1.0),
        ("h.0", 0, 1000, 4096, 0.5, 1.0),
        ("head", 1, 2_000_000, 8 * 2**20, 1.0, 2.0),
    ]
    assert placement_table(rows).splitlines() == [
        "unit  partition  parameters  bytes  forward ms  backward ms   time",
        "----  ---------  ----------  -----  ----------  -----------  -----",
        "h.0           0       1,000  4 KiB        0.50         1.00  25.0%",
        "wte           1       1,000  4 KiB        0.50         1.00  25.0%",
        "head          1   2,000,000  8 MiB        1.00         2.00  50.0%",
    ]
    assert placement_table([PlacementRow(*row) for row in rows]) == placement_table(rows)
