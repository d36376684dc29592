"""Payloads that find a receive that was posted before they were sent.

A payload whose receive is posted flows while both ranks compute; any other waits until the receiver has seen its
header and has asked for it, which takes the threads of two busy ranks. So a receiver keeps one receive posted, for
payloads up to the largest that came so far. The sender counts as the receiver does, and so knows where each goes:

    sizes            4   4   9   2   9
    posted then      0   4   4   4   9
    goes there       no  yes no  yes yes
"""

from __future__ import annotations

POSTED_BYTES = 4 << 20
"""Larger payloads always come after their header: asking for them is a small part of their time."""


class Posted:
    """The receive that one rank has posted for payloads of another, as both of them count it.

    >>> posted = Posted()
    >>> [(posted.bytes, posted.takes(size)) for size in (4, 4, 9, 2, 9)]
    [(0, False), (4, True), (4, False), (4, True), (9, True)]
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0

    def takes(self, size: int) -> bool:
        """True if the next payload, of `size` bytes, goes there; `bytes` is what is posted after it."""
        if size > POSTED_BYTES:
            return False
        fits = size <= self.bytes
        self._largest = max(self._largest, size)
        if fits or not self.bytes:
            self.bytes = self._largest
        return fits
