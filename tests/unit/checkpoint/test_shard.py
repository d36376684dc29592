"""Files of tensors that no framework made: as other readers of the format see them, and range by range."""

from __future__ import annotations

import numpy
import pytest
import safetensors.numpy

from weft.checkpoint.index import Index
from weft.checkpoint.shard import Reader, write
from weft.errors import CheckpointError

NAME = "rank-0000.safetensors"
ARRAYS = {
    "flags": numpy.array([True, False, True]),
    "wide": numpy.arange(6, dtype="float64").reshape(2, 3),
    "one": numpy.array(7, dtype="int32"),
    "none": numpy.zeros((0, 4), "float32"),
    "pairs": numpy.array([1 + 2j], "complex64"),
}


def described(array: numpy.ndarray) -> tuple[str, tuple[int, ...], memoryview]:
    return array.dtype.name, array.shape, memoryview(array.tobytes())


@pytest.fixture
def saved(tmp_path):
    phases: list[str] = []
    shard, entries = write(
        tmp_path, NAME, {path: described(array) for path, array in ARRAYS.items()}, phases.append
    )
    assert phases == ["write", "flush", "checksum"]
    return tmp_path, Index("a", 1, {NAME: shard}, entries)


def test_other_readers_find_every_tensor(saved):
    folder, _ = saved
    found = safetensors.numpy.load_file(folder / NAME)
    for path in set(ARRAYS) - {"pairs"}:
        assert found[path].dtype == ARRAYS[path].dtype and numpy.array_equal(found[path], ARRAYS[path])
    assert found["pairs"].tobytes() == ARRAYS["pairs"].tobytes()  # a dtype of which the format has no name


def test_the_index_finds_every_tensor(saved):
    folder, index = saved
    assert Index.parse(index.to_json()) == index
    reader = Reader(folder, index)
    for path, array in ARRAYS.items():
        reader.check(path)
        entry, content = reader.content(path)
        assert (entry.dtype, entry.shape, bytes(content)) == (array.dtype.name, array.shape, array.tobytes())
        assert entry.start % array.itemsize == 0
    with pytest.raises(CheckpointError, match="has no tensor other"):
        reader.content("other")
    reader.close()


def test_an_altered_byte_is_found(saved):
    folder, index = saved
    content = bytearray((folder / NAME).read_bytes())
    content[index.tensors["wide"].start] ^= 1
    (folder / NAME).write_bytes(content)
    reader = Reader(folder, index)
    with pytest.raises(CheckpointError, match="the bytes of wide do not fit their checksum"):
        reader.check("wide")
    with pytest.raises(CheckpointError, match="the bytes of wide do not fit their checksum"):
        reader.content("wide")
    reader.close()


def test_nothing_that_lies_there_is_replaced(saved):
    folder, _ = saved
    with pytest.raises(FileExistsError):
        write(folder, NAME, {}, lambda phase: None)
