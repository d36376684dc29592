"""Rows of a padded mini-batch grouped by length, so that microbatches have alike numbers of tokens.

Rows are sorted by length and cut into runs. A microbatch computes (rows) x (length of its longest row) positions, and
the largest of these products is made as small as it can be:

    find the least c for which  n_i * longest_i <= c  for all microbatches i

For a given c the longest rows are taken first, as many as fit, and so on; c is found by bisection.

Costs still differ a little. A pipeline fills while its first microbatches run, and drains while its last ones do, so
those are the cheapest: costs rise, and fall again.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.session.cut import Group

PARTS = 16
"""Lengths are rounded up to a multiple of a power of two, so that there are at most so many: each new shape costs."""


def group(rows: Sequence[int], spans: Sequence[tuple[int, int]], length: int, multiple: int = 1) -> Group:
    """The group of these rows of a mini-batch whose tensors have ``length`` positions.

    ``spans``: first and one past the last token of each row of the mini-batch; the two are equal where it has none.
    ``multiple``: the number of positions is rounded up to one, into the padding.

    >>> group([1, 2], [(0, 8), (0, 3), (0, 5)], 8), group([1], [(0, 8), (6, 8)], 8, multiple=4)
    (Group(rows=(1, 2), start=0, stop=5, length=8), Group(rows=(1,), start=4, stop=8, length=8))
    """
    filled = [spans[row] for row in rows if spans[row][0] < spans[row][1]] or [(0, 1)]
    start, stop = min(first for first, _ in filled), max(last for _, last in filled)
    more = _rounded_up(stop - start, multiple) - (stop - start)
    after = min(more, length - stop)
    return Group(tuple(sorted(rows)), max(0, start - (more - after)), stop + after, length)


def group_by_length(spans: Sequence[tuple[int, int]], length: int, count: int) -> list[Group]:
    """``count`` groups of all rows with alike costs, or as many groups as there are rows; the cheapest at both ends.

    >>> [one.rows for one in group_by_length([(0, 8), (0, 2), (0, 2), (0, 3), (0, 2)], 8, 2)]
    [(0,), (1, 2, 3, 4)]
    >>> [one.cost for one in group_by_length([(0, n) for n in (8, 8, 7, 6, 2, 2, 2)], 8, 4)]
    [6, 8, 14, 8]
    """
    multiple = 1 << max(0, (length // PARTS).bit_length() - 1)
    order = sorted(range(len(spans)), key=lambda row: (spans[row][0] - spans[row][1], row))
    lengths = [_rounded_up(max(1, spans[row][1] - spans[row][0]), multiple) for row in order]
    count = min(count, len(order))
    least, most = lengths[0], lengths[0] * len(order)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if len(_runs(lengths, middle)) <= count else (middle + 1, most)
    runs = _runs(lengths, least)
    while len(runs) < count:
        at = max(
            (index for index, (first, last) in enumerate(runs) if last - first > 1),
            key=lambda index: lengths[runs[index][0]] * (runs[index][1] - runs[index][0]),
        )
        first, last = runs[at]
        runs[at : at + 1] = [(first, (first + last) // 2), ((first + last) // 2, last)]
    groups = [group(order[first:last], spans, length, multiple) for first, last in runs]
    groups.sort(key=lambda one: one.cost)
    return groups[::2] + groups[1::2][::-1]


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _runs(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Runs of rows, the longest row first, none of which costs more than ``limit``."""
    runs, first = [], 0
    while first < len(lengths):
        last = min(len(lengths), first + max(1, limit // lengths[first]))
        runs.append((first, last))
        first = last
    return runs
