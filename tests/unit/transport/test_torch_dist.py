"""Tensors into headers and back, without a second process: a group of two in this one moves the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import TransportError
from weft.transport.channel import AHEAD, ALIGNMENT, ASKED, SPEC, VALUE, Key, Message
from weft.transport.payloads import POSTED_BYTES, Payloads, Posted
from weft.transport.tensor_bytes import dense, flat
from weft.transport.torch_dist import (
    DIMS,
    DTYPES,
    INLINE_BYTES,
)

from .wires import Group, Pair, Wire

KEY = Key(VALUE, 3, 1, 2**40 + 5)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two channels; each test sends over them."""
    made = Pair()
    yield made
    made.close()


def round_trip(pair: Pair, message: Message) -> tuple[Message, bool]:
    """What arrives, and whether its payload travelled inside the header."""
    before = pair.wire.sent[AHEAD] + pair.wire.sent[ASKED]
    mailbox = pair.channels[1].mailbox
    seen = mailbox.arrivals
    pair.channels[0].send(1, message)
    mailbox.wait(seen, 60.0)
    assert mailbox.failure is None, mailbox.failure
    arrived = mailbox.take(0, message.key)
    assert arrived is not None
    return arrived, pair.wire.sent[AHEAD] + pair.wire.sent[ASKED] == before


def test_payloads_go_where_a_receive_is_posted():
    """Both sides count alike, whatever the sizes; small ones do not keep a large buffer alive."""
    wire, there = Wire(), Posted()
    payloads = Payloads(Group(1, Wire(), wire), 0)
    for number, size in enumerate((900, 900, 5000, 900, 5000, 1000, POSTED_BYTES + 1, 5000)):
        sent = torch.full((size,), number, dtype=torch.uint8)
        wire.send(sent, AHEAD if there.takes(size) else ASKED)
        arrived = payloads.next(size)
        assert torch.equal(arrived, sent)
        assert arrived.untyped_storage().nbytes() <= 2 * size
    assert all(messages.empty() for messages in wire.queues.values())


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return flat(plain).view(torch.uint8).tolist()


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits that `dtype` may have."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def assert_arrives(pair: Pair, tensor: Tensor) -> bool:
    arrived, inline = round_trip(pair, Message(KEY, tensor, flag=True))
    assert arrived.key == KEY and arrived.flag and arrived.text is None
    got = arrived.payload
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert bits(got) == bits(tensor)
    assert got.data_ptr() % ALIGNMENT == 0, "another library can take it over without a copy"
    return inline


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3), (7, 11, 13)], ids=str)
def test_every_dtype_and_size_arrives_bit_by_bit(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = filled(dtype, *shape)
    inline = assert_arrives(pair, tensor)
    assert inline == (tensor.numel() * tensor.element_size() <= INLINE_BYTES)


@pytest.mark.parametrize("size", [INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
def test_the_limit_of_what_a_header_holds(pair: Pair, size: int):
    assert assert_arrives(pair, filled(torch.uint8, size)) == (size <= INLINE_BYTES)


STRIDED = {
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).t(),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "dim of one": torch.randn(5, 1, 4).transpose(0, 2),
}
GAPPED = {
    "every other": torch.randn(8, 4)[::2],
    "part of columns": torch.randn(4, 8)[:, 2:5],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "diagonal": torch.randn(4, 4).diagonal(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_dense_tensors_keep_their_strides(pair: Pair, name: str):
    tensor = STRIDED[name]
    assert dense(tensor) is tensor, "nothing is copied"
    arrived, _ = round_trip(pair, Message(KEY, tensor))
    assert arrived.payload.stride() == tensor.stride()
    assert torch.equal(arrived.payload, tensor)


@pytest.mark.parametrize("name", GAPPED)
def test_others_are_copied_and_arrive_with_their_values(pair: Pair, name: str):
    tensor = GAPPED[name]
    copy = dense(tensor)
    assert copy is not tensor and not copy.is_conj() and not copy.is_neg()
    assert flat(copy).numel() == tensor.numel()
    arrived, _ = round_trip(pair, Message(KEY, tensor))
    assert torch.equal(arrived.payload, tensor)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_view_arrives_with_its_values(pair: Pair, data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim]))
        step = data.draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    assert_arrives(pair, tensor)


def test_a_slice_does_not_send_the_memory_around_it(pair: Pair):
    tensor = torch.arange(1000.0)[10:20]
    assert assert_arrives(pair, tensor), "ten numbers fit the header"


def test_what_needs_a_gradient_arrives_without_graph(pair: Pair):
    tensor = torch.randn(3, requires_grad=True) * 2
    arrived, _ = round_trip(pair, Message(KEY, tensor))
    assert not arrived.payload.requires_grad and torch.equal(arrived.payload, tensor)


@pytest.mark.parametrize("text", ["", "x", "naïve ✓", "long " * 1000])
def test_texts_arrive(pair: Pair, text: str):
    arrived, _ = round_trip(pair, Message(Key(SPEC, 0, 0, 5), text=text, flag=True))
    assert (arrived.text, arrived.payload, arrived.flag) == (text, None, True)


def test_a_message_without_content_arrives(pair: Pair):
    arrived, inline = round_trip(pair, Message(KEY))
    assert arrived == Message(KEY) and inline


def test_numbers_of_63_bits_fit_a_key(pair: Pair):
    key = Key(SPEC, 2**31, 2**20, 2**63 - 1)
    assert round_trip(pair, Message(key))[0].key == key


def test_as_many_dims_as_the_header_has(pair: Pair):
    assert_arrives(pair, torch.randn([1] * (DIMS - 1) + [2]))
    with pytest.raises(TransportError, match=r"a tensor of torch\.float32 with 13 dims cannot be sent"):
        round_trip(pair, Message(KEY, torch.randn([1] * (DIMS + 1))))


def test_a_dtype_that_no_header_knows_is_an_error_that_lists_those_it_knows(pair: Pair):
    with pytest.raises(
        TransportError, match=r"a tensor of torch\.bits8 .*weft sends the dtypes torch\.float32"
    ):
        round_trip(pair, Message(KEY, torch.empty(2, dtype=torch.bits8)))


def test_a_sparse_tensor_is_an_error_that_says_what_to_do(pair: Pair):
    with pytest.raises(TransportError, match=r"layout torch\.sparse_coo cannot be sent .*use \.to_dense\(\)"):
        round_trip(pair, Message(KEY, torch.eye(3).to_sparse()))
