"""From measured times to a machine's file: a frontend measures, the fit is made here.

a product of n FLOPs       (n + half_flops) / rate                             least squares of relative errors
a sum over r ranks         2 (r - 1) / r size / bandwidth + 2 (r - 1) latency   the same
a layer that r share       3 (r - 1) / r size / bandwidth + 3 (r - 1) latency   the same: gathered twice, scattered once
a sum of a cut layer            as a sum over r ranks; twice that are two all-gathers and two reduce-scatters
between products           bytes / rate                                         the mean of times for a byte
attention                  FLOPs / rate                                         the mean of times for a FLOP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from weft.document import Document
from weft.errors import FormatError
from weft.machines.accelerator import DTYPES, Accelerator
from weft.machines.catalogue import cpu
from weft.machines.host import Conduct, Host
from weft.topology.cluster import Link

Times = Sequence[tuple[float, float]]
"""What was done (FLOPs, bytes) and the seconds that it took."""


@dataclass(frozen=True)
class Measured:
    """The measures of one rank while all were at it.

    Attributes:
        device: What it computes on.
        memory_bytes: What that has.
        products: By dtype, FLOPs of products and their times.
        moves: Bytes that a plan counts for what runs between products, for the loss and the optimizer, and their times.
        copies: Bytes that copies and additions read and wrote, and times.
        attention: FLOPs that a plan counts for fused attention, and times; of the dtype that comes last in `products`.
        sums: Bytes that all ranks all-reduced, and times; nothing for one rank.
        shared: Bytes of a layer whose parameters all ranks share, and what exchanging it takes in a step.
        cut: Bytes that layers cut over all ranks all-reduce, and times of a sum.
        tokens: The same where each rank has some of the tokens: of an all-gather and a reduce-scatter.
    """

    device: str
    memory_bytes: int
    products: Mapping[str, Times]
    moves: Times
    copies: Times
    attention: Times
    sums: Times = ()
    shared: Times = ()
    cut: Times = ()
    tokens: Times = ()


def measured_from_json(text: str) -> Measured:
    """The measures that a rank wrote.

    Raises:
        FormatError: It is nothing of the kind.
    """
    given = Document.parse(text, kind="measured machine", version=1)
    products = given["products"]
    return Measured(
        given["device"].text(),
        given["memory_bytes"].whole(),
        {dtype: _times(products[dtype]) for dtype in DTYPES if dtype in products},
        _times(given["moves"]),
        _times(given["copies"]),
        _times(given["attention"]),
        _times(given["sums"]),
        *(_times(given[name]) if name in given else () for name in ("shared", "cut", "tokens")),
    )


def _times(given: Document) -> Times:
    found = []
    for pair in given:
        numbers = [each.number() for each in pair]
        if len(numbers) != 2:
            raise FormatError(f"{pair.path}: expected an amount and seconds, found {len(numbers)} numbers")
        found.append((numbers[0], numbers[1]))
    if not all(amount > 0 and seconds > 0 for amount, seconds in found):
        raise FormatError(f"{given.path}: times and amounts must be above 0")
    return found


def fit_line(times: Times) -> tuple[float, float]:
    """Rate and start of `seconds = amount / rate + start`, by least squares of relative errors; start is not negative.

    >>> rate, start = fit_line([(1e9, 1.5), (3e9, 3.5)])
    >>> round(rate), round(start, 6)
    (1000000000, 0.5)
    """
    # sum (a x + b y - 1)^2 with x = amount / seconds, y = 1 / seconds
    pairs = [(amount / seconds, 1 / seconds) for amount, seconds in times]
    xx, xy, yy = (
        sum(x * x for x, _ in pairs), sum(x * y for x, y in pairs), sum(y * y for _, y in pairs)
    )  # fmt: skip
    x_sum, y_sum = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        slope, start = (x_sum * yy - y_sum * xy) / determinant, (y_sum * xx - x_sum * xy) / determinant
        if slope > 0 and start >= 0:
            return 1 / slope, start
    return xx / x_sum, 0.0


def host_of(name: str, ranks: Sequence[Measured], memory_bytes: int) -> Host:
    """The machine's file: of each time that of the slowest rank, since all wait for it.

    Args:
        name: Of the machine.
        ranks: What each measured, all at once.
        memory_bytes: Of the host.
    """
    first, usual = ranks[0], cpu(1)
    peak, share, half_flops = {}, {}, 0.0
    for dtype in first.products:
        slowest = _slowest([rank.products[dtype] for rank in ranks])
        rate, start = fit_line(slowest)
        peak[dtype] = max(rate, *(amount / seconds for amount, seconds in slowest))
        share[dtype] = rate / peak[dtype]
        half_flops = start * rate  # of the last, in which most will train
    copied = max(amount / seconds for amount, seconds in _slowest([rank.copies for rank in ranks]))
    moved = 1 / mean(seconds / size for size, seconds in _slowest([rank.moves for rank in ranks]))
    wide = list(first.products)[-1]
    attention = 1 / mean(seconds / flops for flops, seconds in _slowest([rank.attention for rank in ranks]))
    most = max(copied, moved)
    device = Accelerator(
        f"{first.device} (measured)", first.memory_bytes, most, peak, share, half_flops, moved / most,
        min(1.0, attention / peak[wide]),
    )  # fmt: skip
    return Host(
        name, device, len(ranks), _ring([rank.sums for rank in ranks], 2) or usual.inside, usual.network,
        memory_bytes, conduct=Conduct(data=0.0, parameters=0.0),
        sharing=_ring([rank.shared for rank in ranks], 3),
        sums=_ring([rank.cut for rank in ranks], 2), tokens=_ring([rank.tokens for rank in ranks], 2),
    )  # fmt: skip


def _ring(ranks: Sequence[Times], exchanges: int) -> Link | None:
    """The link of a ring in which so many gathers take these times; None if nothing was measured."""
    if not ranks[0]:
        return None
    rate, start = fit_line(_slowest(ranks))
    steps = exchanges * (len(ranks) - 1)
    return Link(start / steps, rate * steps / len(ranks))


def _slowest(ranks: Sequence[Times]) -> Times:
    """The slowest rank's time of each measure, in their order; a rank that was slower may have left out the largest."""
    return [(each[0][0], max(seconds for _, seconds in each)) for each in zip(*ranks, strict=False)]
