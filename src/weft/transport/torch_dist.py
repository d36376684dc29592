"""Messages over ``torch.distributed``: gloo for CPU tensors, NCCL for CUDA tensors.

Every message is a header of fixed size, then its payload where it has one that does not fit the header:

    int64[]:  magic  sequence  kind step microbatch number  flag  form  dtype  ndim  size  dims  strides  inline

The header makes messages self-describing (dtype, shape and sequence number are checked on arrival, always).
One thread for each peer receives: it always has
a receive posted for the next header, and one for the next payload (see ``payloads``), so the two
directions of a pair cannot block each other. Sends are asynchronous; a second thread for each
peer waits for them and lets go of the buffers.

Between CPU ranks of one host headers go through pipes, and payloads stand in shared memory when their header comes
(see ``rings``): there gloo has only what finds no room.

CUDA payloads go through NCCL when every rank has a GPU of its own: one communicator for each direction of
each pair, used in header order only, so that no receive can wait behind a send. Ranks that share a
GPU, or a build without NCCL, stage through host memory. The threads have CUDA streams of their own: neither does a
message wait for what the step has queued, nor the step for a message that is on its way.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import PeerError, TransportError
from weft.transport.channel import ABORT, AHEAD, ASKED, HEADERS, Key, Mailbox, Message
from weft.transport.payloads import Payloads, Posted
from weft.transport.rings import Rings
from weft.transport.tensor_bytes import bytes_tensor, dense, flat, to_bytes

HEADER_BYTES = 512
MAGIC = 0x77656674
FIELDS = 11
FORM_AT = 7
DIMS = 12
WORDS = struct.Struct(f"<{FIELDS + 2 * DIMS}q")
PLACE = struct.Struct("<2q")
INLINE_AT = WORDS.size
INLINE_BYTES = HEADER_BYTES - INLINE_AT
NOTHING, TENSOR, TEXT, IN_RING, DIRECT, ON_HOST = range(6)
"""What a header announces. A tensor goes to the receiver's device, through host memory or directly, except one that the
sender has beside its device, in host memory: that stays there."""
WITHOUT_END = timedelta(days=365)
"""Who waits for a header waits for nobody: there may be none for as long as the script does other things. A rank that
needs a message waits in the mailbox, for ``wait_timeout``."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class TorchChannel:
    """This rank's end of a pipeline's network.

    ``group``: a gloo group of the pipeline's ranks. The channel calls its ``rank()``, ``size()``, ``send`` and
    ``recv``, so that tests can hand in one without processes. ``device``: where arriving tensors go.
    ``direct``: NCCL groups by (sender, receiver) position, or empty to stage CUDA tensors through the host.
    ``mailbox``: that of another channel, which this one fills too; its peers count -1, -2, ... there, or from
    -1 - ``after`` on, behind those of a third one.
    ``rings``: memory and pipes to ranks of the same host, for CPU ranks; the channel closes them.
    ``ranks``: the job's ranks of the group's members, as errors name them; PyTorch knows them for its own groups.
    ``stream``: where what arrives will be used, on a GPU.
    ``record(kind, peer, key, start_s, end_s)``, if one is set, gets every message that has left ("send") or
    arrived ("recv", from its header on), on this channel's threads.
    """

    record: Callable[[str, int, Key, Any, float], None] | None = None
    moment: Callable[[], Any] = time.perf_counter
    stream: Any = None
    _mirrored = False
    _after = 0

    def __init__(
        self,
        group: Any,
        device: torch.device,
        direct: dict[tuple[int, int], Any] | None = None,
        mailbox: Mailbox | None = None,
        rings: Rings | None = None,
        ranks: Sequence[int] | None = None,
        after: int = 0,
    ) -> None:
        self.mailbox = mailbox or Mailbox()
        self._mirrored = mailbox is not None
        self._after = after
        self.rank, size = group.rank(), group.size()
        self.ranks = list(ranks) if ranks is not None else dist.get_process_group_ranks(group)
        self.device = device
        self._group = group
        self._direct = direct or {}
        self._rings = rings
        self._pipes = rings.pipes if rings is not None else {}
        self._late = [0] * size
        self._sent = [0] * size
        self._lock = threading.Lock()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._pending: list[queue.SimpleQueue[Any]] = []
        self._posted = [Posted() for _ in self._sent]
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device)
        for peer in range(size):
            self._pending.append(queue.SimpleQueue())
            if peer != self.rank:
                for target in (self._receive, self._reap):
                    name = f"weft-{target.__name__.strip('_')}-{peer}"
                    thread = threading.Thread(target=target, args=(peer,), name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def send(self, peer: int, message: Message) -> None:
        began = self.moment()
        words, payload, inline, direct = self._pack(peer, message)
        with self._lock:
            words[1] = self._sent[peer]
            self._sent[peer] += 1
            if payload is not None and not direct and message.text is None and self._rings is not None:
                place = self._rings.put(peer, payload)
                if place is not None:
                    words[FORM_AT], inline, payload = IN_RING, PLACE.pack(*place), None
            try:
                work = self._send_header(peer, header_of(words, inline))
                if payload is not None and direct:
                    group = self._direct[(self.rank, peer)]
                    work.append((group.send([payload], int(peer > self.rank), 1), payload))
                elif payload is not None:
                    tag = AHEAD if self._posted[peer].takes(payload.numel()) else ASKED
                    work.append((self._group.send([payload], peer, tag), payload))
            except (RuntimeError, OSError) as error:
                raise PeerError(self.ranks[peer], f"connection lost: {error}") from error
        if work:
            self._pending[peer].put((work, message.key, began))
        else:
            self._record("send", peer, message.key, began)

    def _send_header(self, peer: int, header: bytes) -> list[tuple[Any, Any]]:
        """Sends a header; what there is to wait for. Called with the lock held."""
        pipe = self._pipes.get(peer)
        if pipe is None:
            content = bytes_tensor(header)
            return [(self._group.send([content], peer, HEADERS), content)]
        if self._late[peer] or not pipe.write(header):  # behind those that wait for room already
            self._late[peer] += 1
            return [(Late(self, peer, header), None)]
        return []

    def _pack(self, peer: int, message: Message) -> tuple[list[int], torch.Tensor | None, bytes, bool]:
        """The header's words, and the payload (uint8 [size], or whole if it goes directly) or its bytes if few."""
        payload: torch.Tensor | None = None
        form, dtype, direct, inline = NOTHING, 0, False, b""
        shape: tuple[int, ...] = ()
        strides: tuple[int, ...] = ()
        size = 0
        if message.text is not None:
            form, inline = TEXT, message.text.encode()
            size = len(inline)
            shape, strides = (size,), (1,)
            if size > INLINE_BYTES:
                payload, inline = bytes_tensor(inline), b""
        elif message.payload is not None:
            payload = dense(message.payload.detach())
            form = TENSOR if payload.device.type == self.device.type else ON_HOST
            dtype, shape, strides = DTYPE_CODES.get(payload.dtype, -1), payload.shape, payload.stride()
            if dtype < 0 or len(shape) > DIMS:
                raise TransportError(
                    f"a tensor of {payload.dtype} with {len(shape)} dims cannot be sent between ranks: "
                    f"weft sends the dtypes {', '.join(str(d) for d in DTYPES)} with at most {DIMS} dims"
                )
            size = payload.numel() * payload.element_size()
            direct = form == TENSOR and (self.rank, peer) in self._direct
            form = DIRECT if direct and size else form
            content = flat(payload) if direct else flat(payload).view(torch.uint8).cpu()
            if not direct and size <= INLINE_BYTES:
                payload, inline = None, to_bytes(content)
            else:
                payload = content
        words = [MAGIC, 0, *message.key, int(message.flag), form, dtype, len(shape), size, *shape]
        words += [0] * (FIELDS + DIMS - len(words))
        words += strides
        words += [0] * (FIELDS + 2 * DIMS - len(words))
        return words, (payload if size else None), inline, direct

    def _receive(self, peer: int) -> None:
        expected = 0
        payloads = Payloads(self._group, peer)
        try:
            own_stream(self.device)
            while True:
                header = self._next_header(peer)
                began = time.perf_counter()
                fields = WORDS.unpack_from(header)
                if fields[0] != MAGIC or fields[1] != expected:
                    raise TransportError(
                        f"message {expected} from pipeline rank {peer} arrived as {list(fields[:2])}: "
                        "something else uses weft's process group"
                    )
                expected += 1
                message = self._unpack(peer, header, fields, payloads)
                if message.key.kind == ABORT:
                    if not message.text:
                        return
                    self.mailbox.fail(PeerError(self.ranks[peer], message.text))
                    continue  # up to the peer's end, so that both sides' threads end
                self._record("recv", peer, message.key, began)
                self.mailbox.put(-1 - self._after - peer if self._mirrored else peer, message)
                del message, header  # not to be kept while this thread waits for the next
        except BaseException as error:  # the thread's end is the connection's end: whoever waits must know
            if not self._closing:
                self.mailbox.fail(
                    error
                    if isinstance(error, TransportError)
                    else PeerError(self.ranks[peer], f"connection lost: {error}")
                )

    def _next_header(self, peer: int) -> bytes:
        pipe = self._pipes.get(peer)
        if pipe is None:
            content = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            self._group.recv([content], peer, HEADERS).wait(WITHOUT_END)
            return to_bytes(content)
        header = pipe.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise ConnectionError("the process at its other end is gone")
        return header

    def _unpack(self, peer: int, header: bytes, fields: Sequence[int], payloads: Payloads) -> Message:
        key, (flag, form, dtype, ndim, size) = Key(*fields[2:6]), fields[6:FIELDS]
        if form == NOTHING:
            return Message(key, flag=bool(flag))
        shape = fields[FIELDS : FIELDS + ndim]
        strides = fields[FIELDS + DIMS : FIELDS + DIMS + ndim]
        if form == DIRECT:
            payload = torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=self.device)
            self._direct[(peer, self.rank)].recv([flat(payload)], int(peer > self.rank), 1).wait()
            return Message(key, self._arrived(payload), flag=bool(flag))
        if form == IN_RING:
            assert self._rings is not None
            at, end = PLACE.unpack_from(header, INLINE_AT)
            raw = self._rings.take(peer, at, end, size)
        elif size <= INLINE_BYTES:
            if form == TEXT:
                return Message(key, text=header[INLINE_AT : INLINE_AT + size].decode(), flag=bool(flag))
            raw = bytes_tensor(header[INLINE_AT : INLINE_AT + size])
        else:
            raw = payloads.next(size)
        if form == TEXT:
            return Message(key, text=to_bytes(raw).decode(), flag=bool(flag))
        payload = raw.view(DTYPES[dtype]).as_strided(shape, strides)
        return Message(
            key, payload if form == ON_HOST else self._arrived(payload.to(self.device)), flag=bool(flag)
        )

    def _arrived(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload when it is there; its memory is not used again before the step is done with it."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()  # only this thread waits
            payload.record_stream(self.stream)
        return payload

    def _reap(self, peer: int) -> None:
        own = own_stream(self.device)
        while (sent := self._pending[peer].get()) is not None:
            if isinstance(sent, threading.Event):
                sent.set()
                continue
            work, key, began = sent
            try:
                for each, _ in work:
                    each.wait()
                if own is not None:  # NCCL's wait holds up the stream alone
                    own.synchronize()
                work.clear()
                self._record("send", peer, key, began)
            except (RuntimeError, OSError) as error:
                if not self._closing:
                    self.mailbox.fail(PeerError(self.ranks[peer], f"connection lost: {error}"))
            del sent, work, each

    def _write_late(self, peer: int, header: bytes) -> None:
        """Write a header that found no room in its pipe."""
        while True:
            self._pipes[peer].wait_for_room()
            with self._lock:
                if self._pipes[peer].write(header):
                    self._late[peer] -= 1
                    return

    def _record(self, kind: str, peer: int, key: Key, began: Any) -> None:
        if self.record is not None:
            self.record(kind, peer, key, began, time.perf_counter())

    def flush(self) -> None:
        events = []
        for peer, pending in enumerate(self._pending):
            if peer != self.rank:
                event = threading.Event()
                pending.put(event)
                events.append(event)
        for event in events:
            event.wait()

    def abort(self, text: str) -> None:
        """Send every peer that this rank failed, with the cause; their waits end with it."""
        for peer in range(len(self._sent)):
            if peer != self.rank:
                try:
                    self.send(peer, Message(Key(ABORT, 0, 0, 0), text=text))
                except (PeerError, TransportError):
                    pass  # that peer is gone already

    def close(self) -> None:
        self._closing = True
        for peer in range(len(self._sent)):
            if peer != self.rank:
                try:
                    self.send(peer, Message(Key(ABORT, 0, 0, 0)))
                except PeerError:
                    pass
                self._pending[peer].put(None)

    def join(self, timeout_s: float = 5.0) -> None:
        """Wait for the threads to end, after every rank called :meth:`close`."""
        for thread in self._threads:
            thread.join(timeout_s)
        if self._rings is not None and not any(thread.is_alive() for thread in self._threads):
            self._rings.close()


class Late:
    """A header that waits for room, as something to wait for."""

    def __init__(self, channel: TorchChannel, peer: int, header: bytes) -> None:
        self._arguments = channel, peer, header

    def wait(self) -> None:
        channel, peer, header = self._arguments
        channel._write_late(peer, header)


def own_stream(device: torch.device) -> Any:
    """This thread's CUDA stream from now on, a new one; ``None`` on the CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    return stream


def header_of(words: Sequence[int], inline: bytes) -> bytes:
    return WORDS.pack(*words) + inline + bytes(INLINE_BYTES - len(inline))
