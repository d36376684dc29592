"""Objects and tensors between ranks, between steps: ``send``, ``recv_from``, ``broadcast``, ``allgather``, ``barrier``.

    send       sender    --send, sizes-->        receiver      checks the call and the sizes
                         <--ready--
                         --the object-->
    allgather  everybody --allgather, group-->   first rank of the group, which sends the same to everybody
    barrier              <--ready--              when it has heard of all; then the group's own collectives

Two ranks that meet in different calls get an error both, at once; see ``handshake``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from weft.communication import handshake
from weft.communication.handshake import CALLS, READY, REFUSED, Handshake, Header, Member, make_header
from weft.communication.messages import Packed, pack, unpack
from weft.errors import DivergenceError, TransportError, UsageError
from weft.session import current

MAX_BYTES = 1 << 32
"""How many bytes of one object a receiver takes unless the script gives another limit: 4 GiB."""


class CommGroup(enum.Enum):
    """A group of ranks along an axis of the mesh: that of the calling rank."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    TP_GROUP = "tp"
    PP_GROUP = "pp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """The meaning of a rank's number: its place among all ranks, or in the calling rank's group of an axis."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    TP_RANK = "tp"
    PP_RANK = "pp"
    RDP_RANK = "rdp"


WORLD, MP_GROUP, DP_GROUP, TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup
_AXES = [group.value for group in CommGroup]
_INSIDE = ("mp", "pp", "tp")
"""The axes inside a replica."""
_READY = Header(READY, 0)
_EXCESS = 1
_Kind = TypeVar("_Kind", CommGroup, RankType)


def send(
    obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK, *, allow_pickle: bool = False
) -> None:
    """Send an object to one rank, which calls :func:`recv_from`; returns when that rank has taken it.

    JSON's values, tuples, sets, bytes, tensors, NumPy arrays and dataclasses travel, nested up to 100 levels; tensors
    without their graph. Anything else needs ``allow_pickle`` on both sides. Two ranks that send to each other at the
    same time are an error: one must receive first.

    Raises :class:`TransportError` for an object that cannot travel, with its path and type, before anything is sent,
    and for one that the receiver does not take; :class:`DivergenceError` if the other rank calls something else.
    """
    session = _between_steps("send")
    peer = _rank_of(session, dest_rank, rank_type, "dest_rank")
    packed = _pack(session, obj, allow_pickle)
    with session.doing(f"send() to rank {peer}"):
        _deliver(session, [peer], packed, handshake.SEND, "world")


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD, *, allow_pickle: bool = False) -> None:
    """Send an object to all other ranks of a group. Only the sender calls it; the others call :func:`recv_from`.

    Objects and errors as in :func:`send`.
    """
    session = _between_steps("broadcast")
    axis = _axis_of(session, group)
    packed = _pack(session, obj, allow_pickle)
    others = [rank for rank in session.peers(axis) if rank != session.rank]
    with session.doing(f"broadcast() to {group.name}"):
        _deliver(session, others, packed, handshake.BROADCAST, axis)


def recv_from(
    src_rank: int,
    rank_type: RankType = RankType.WORLD_RANK,
    *,
    allow_pickle: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Any:
    """The object that another rank sends with :func:`send` or :func:`broadcast`; waits for it.

    Tensors that were on the sender's GPU arrive on this rank's device, all others on the CPU; none has a graph.
    ``max_bytes``: tensors and arrays of more bytes are refused before they are sent.

    Raises :class:`TransportError` for what is refused and :class:`DivergenceError` if the other rank calls something
    else; the other rank gets the same.
    """
    session = _between_steps("recv_from")
    if session.rehearsal is not None:
        raise UsageError("recv_from() waits for another rank, and weft rehearse runs one: leave it out there")
    peer = _rank_of(session, src_rank, rank_type, "src_rank")
    with session.doing(f"recv_from() rank {peer}"):
        line = Handshake(session)
        header, _ = line.take_header(line.expect_header(peer))
        if header.call not in (handshake.SEND, handshake.BROADCAST):
            waiting = [peer] if header.call in (handshake.ALLGATHER, handshake.BARRIER) else []
            _refuse(line, waiting, _difference(session.rank, "recv_from()", peer, header), DivergenceError)
        excess = header.find_excess(max_bytes, allow_pickle)
        if excess:
            text = f"rank {session.rank} does not take the object of rank {peer}: {excess}"
            _refuse(line, [peer], text, TransportError)
        line.send_header(peer, _READY)
        return session.travel.incoming(line.receive(peer, header, allow_pickle))


def allgather(
    obj: Any, group: CommGroup = CommGroup.WORLD, *, allow_pickle: bool = False, max_bytes: int = MAX_BYTES
) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; every rank of the group calls it.

    ``max_bytes``: how many bytes of tensors and arrays one rank may give. Objects and errors as in :func:`send`.
    """
    session = _between_steps("allgather")
    axis = _axis_of(session, group)
    packed = _pack(session, obj, allow_pickle)
    ranks = session.peers(axis)
    if len(ranks) == 1:
        return [session.travel.incoming(unpack(packed.text, packed.blobs, session.device, allow_pickle))]
    with session.doing(f"allgather() over {group.name}"):
        _meet(session, handshake.ALLGATHER, axis)
        found = handshake.exchange(
            packed, session.group(axis), ranks, session.device, max_bytes, allow_pickle
        )
        return [session.travel.incoming(each) for each in found]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until every rank of a group has come here."""
    session = _between_steps("barrier")
    axis = _axis_of(session, group)
    with session.doing(f"barrier() of {group.name}"):
        _meet(session, handshake.BARRIER, axis)


def dp_barrier() -> None:
    """:func:`barrier` for the ranks with the same partition."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """:func:`barrier` for the ranks that hold one replica."""
    barrier(CommGroup.MP_GROUP)


def _between_steps(name: str) -> Member:
    """The session; an error if a step runs."""
    session = cast("Member", current.session())
    if session.tracing or session.travel.in_step():
        raise UsageError(f"{name}() was called {session.travel.refusal}")
    return session


def _pack(session: Member, obj: Any, allow_pickle: bool) -> Packed:
    return pack(session.travel.outgoing(obj), allow_pickle, session.travel.is_remote)


def _need_member(value: object, kind: type[_Kind], name: str) -> _Kind:
    if not isinstance(value, kind):
        names = ", ".join(str(member) for member in kind)
        shown = str(value) if isinstance(value, enum.Enum) else repr(value)
        raise UsageError(f"{name} is {shown}, it must be one of {names}")
    return value


def _axis_of(session: Member, group: CommGroup) -> str:
    axis = _need_member(group, CommGroup, "group").value
    if axis not in _INSIDE:
        session.need_all_replicas(group.name)
    return axis


def _rank_of(session: Member, number: int, rank_type: RankType, name: str) -> int:
    """The global rank of a position in one of this rank's groups."""
    axis = _need_member(rank_type, RankType, "rank_type").value
    if axis not in _INSIDE:
        session.need_all_replicas(rank_type.name)
    ranks = session.peers(axis)
    if not isinstance(number, int) or not 0 <= number < len(ranks):
        raise UsageError(f"{name} is {number!r}, but {rank_type.name} counts from 0 to {len(ranks) - 1}")
    if ranks[number] == session.rank:
        raise UsageError(f"{name} {number} ({rank_type.name}) is this rank itself: use the object as it is")
    return ranks[number]


def _deliver(session: Member, peers: Sequence[int], packed: Packed, call: int, axis: str) -> None:
    """Offer an object to ranks, and send it to each as soon as that one is ready."""
    if not peers or session.rehearsal is not None:
        return
    line = Handshake(session)
    mine = make_header(call, _AXES.index(axis), packed)
    answers = []
    for peer in peers:
        answers.append((peer, line.expect_header(peer)))
        line.send_header(peer, mine)
    for peer, answer in answers:
        _accept(session, line, answer, peer, mine, _READY)
        line.send(peer, packed)
    line.flush()


def _accept(session: Member, line: Handshake, answer: Any, peer: int, mine: Header, wanted: Header) -> None:
    """Take an answer; an error if it is not the wanted one. ``mine``: the header that this rank has sent."""
    header, text = line.take_header(answer)
    if header.call == REFUSED:
        raise (TransportError if header.axis == _EXCESS else DivergenceError)(text)
    if header[:2] != wanted[:2]:
        raise DivergenceError(_difference(session.rank, _call_text(mine), peer, header))


def _meet(session: Member, call: int, axis: str) -> None:
    """Return when all ranks of a group have made the same call.

    Each rank sends a message to the first one of the group, which answers when it has those of all.
    """
    first, *others = session.peers(axis)
    if not others or session.rehearsal is not None:
        return
    line = Handshake(session)
    mine = Header(call, _AXES.index(axis))
    if session.rank != first:
        answer = line.expect_header(first)
        line.send_header(first, mine)
        _accept(session, line, answer, first, mine, mine)
        _accept(session, line, line.expect_header(first), first, mine, _READY)
        line.flush()
        return
    answers = [line.expect_header(peer) for peer in others]
    for peer in others:
        line.send_header(peer, mine)
    heard: list[int] = []
    for peer, answer in zip(others, answers, strict=True):
        try:
            _accept(session, line, answer, peer, mine, mine)
        except DivergenceError as error:
            _refuse(line, heard, str(error), DivergenceError)
        heard.append(peer)
    line.flush()
    for peer in others:
        line.send_header(peer, _READY)
    line.flush()


def _refuse(line: Handshake, peers: Sequence[int], text: str, kind: type[Exception]) -> None:
    """Raise an error here and on the ranks that wait for an answer."""
    reason = Header(REFUSED, _EXCESS if kind is TransportError else 0)
    line.abandon()
    for peer in peers:
        line.send_header(peer, reason, text)
    line.flush()
    raise kind(text)


def _call_text(header: Header) -> str:
    """The call that a header names, as a script writes it."""
    grouped = header.call in (
        handshake.ALLGATHER,
        handshake.BARRIER,
        handshake.BROADCAST,
    ) and 0 <= header.axis < len(_AXES)
    return f"{CALLS[header.call]}({list(CommGroup)[header.axis].name if grouped else ''})"


def _difference(rank: int, call: str, peer: int, header: Header) -> str:
    """The error of two ranks that meet in different calls."""
    return (
        f"rank {rank} is in {call} and meets rank {peer} in {_call_text(header)}: a send or broadcast meets a "
        "recv_from, allgather and barrier are called by the whole group, all in the same order"
    )
