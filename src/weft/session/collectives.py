"""Texts from rank to rank, over bytes that a frontend's own library moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.errors import PeerError
from weft.session.session import Session


class BytesPort(Protocol):
    """Ranks that hand bytes to each other. A frontend implements this over a group of its library.

    Every rank of the group calls the same methods in the same order.
    """

    def broadcast_bytes(self, content: bytes, source: int) -> bytes:
        """The content that rank ``source`` of the job gives, on every rank; what the others give does not count."""

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of every rank, in the group's order, on every rank."""


class Alone:
    """The port of a rank that has nobody to talk to."""

    def broadcast_bytes(self, content: bytes, source: int) -> bytes:
        return content

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return [content]


def broadcast_text(text: str, source: int, port: BytesPort) -> str:
    """The text of rank ``source`` of the job, on every rank.

    >>> broadcast_text("mine", 0, Alone())
    'mine'
    """
    return port.broadcast_bytes(text.encode(), source).decode()


def gather_texts(text: str, port: BytesPort) -> list[str]:
    """Every rank's text, in the group's order, on every rank."""
    return [content.decode() for content in port.gather_bytes(text.encode())]


def agree_on(session: Session, port: BytesPort, make: Callable[[], str], what: str, source: int = 0) -> str:
    """The text that ``make`` gives on rank ``source``, on every rank. ``port``: between all ranks that call this.

    If ``make`` raises there, that rank raises the same error, and all others a :class:`PeerError` with its text.
    """
    answer, error = "", None
    if session.rank == source:
        try:
            answer = "=" + make()
        except Exception as caught:
            error = caught
            answer = f"!{type(caught).__name__}: {caught}"
    with session.doing(what):
        answer = broadcast_text(answer, source, port)
    if error is not None:
        raise error
    if answer.startswith("!"):
        raise PeerError(source, answer[1:])
    return answer[1:]
