"""Checksums tell of accidents only: what stands behind them is looked at before anything is changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta

import weft.torch as weft
from tests.training import step_of
from tests.unit.test_untrusted import little_memory
from weft.errors import CheckpointError
from weft.torch.placed.plan import Plan

from .training import made, saved, train, values

pytestmark = pytest.mark.usefixtures("job")


# --- folders of torch.distributed.checkpoint ------------------------------------------------------------------


def small() -> weft.DistributedModel:
    model = weft.DistributedModel(nn.Linear(4, 4, bias=False))
    step = step_of(lambda model, x: model(x).sum())
    step(model, torch.ones(2, 4))
    return model


def folder_of(root: Path, change: Callable[[Any], Any] | None = None) -> Path:
    """A folder with a weight of sevens, its metadata changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"weight": torch.full((4, 4), 7.0)}, storage_writer=FileSystemWriter(root), no_dist=True)
    if change is not None:
        metadata = pickle.loads((root / ".metadata").read_bytes())
        changed = change(metadata)
        (root / ".metadata").write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(metadata))
    return root


def weight_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["weight"]


def sizes(metadata: Metadata, size: tuple[int, ...]) -> None:
    weight_of(metadata).size = torch.Size(size)


def chunks(metadata: Metadata, *blocks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    weight_of(metadata).chunks[:] = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in blocks]


def place(metadata: Metadata, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        info.__dict__.update(fields)


DISTRIBUTED = {
    "no chunks": (lambda m: chunks(m), "do not fill it"),
    "a chunk too small": (lambda m: chunks(m, ((0, 0), (3, 4))), "do not fill it"),
    "chunks in each other": (lambda m: chunks(m, ((0, 0), (2, 4)), ((0, 0), (2, 4))), "do not fill it"),
    "a chunk outside": (lambda m: chunks(m, ((0, 0), (4, 5))), "do not fill it"),
    "a chunk of other dims": (lambda m: chunks(m, ((0,), (16,))), "is nowhere"),
    "a chunk that is nowhere": (lambda m: chunks(m, ((0, 0), (2, 4)), ((2, 0), (2, 4))), "is nowhere"),
    "a larger tensor": (
        lambda m: (sizes(m, (1 << 18, 1 << 18)), chunks(m, ((0, 0), (1 << 18, 1 << 18)))),
        "claims 27487"
    ),
    "another dtype": (lambda m: setattr(weight_of(m).properties, "dtype", torch.float16), "has something else at byte"),
    "a huge dim": (lambda m: sizes(m, (1 << 62, 4)), "more elements than can be"),
    "many dims": (lambda m: sizes(m, (1,) * 100_000), "too many dims"),
    "a place beyond the file": (lambda m: place(m, offset=1 << 40), "is truncated"),
    "a place before the file": (lambda m: place(m, offset=-1), "a place is negative"),
    "a length beyond the file": (lambda m: place(m, length=1 << 40), "is truncated"),
    "another file": (lambda m: place(m, relative_path="../secret"), "no file in its folder"),
    "an extension": (lambda m: place(m, transform_descriptors=["zstd"]), "by an extension"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "is nowhere"),
    "no metadata": (lambda m: pickle.dumps({"a": 1}), "it is no Metadata"),
    "an empty file": (lambda m: b"", "nothing of it ran"),
    "a memo for 4 GB": (lambda m: b"\x80\x02Nr\xff\xff\xff\xff.", "it is no Metadata"),
    "a text for 4 GB": (lambda m: b"\x80\x02X\xff\xff\xff\xff.", "nothing of it ran"),
    "a key that takes for ever": (
        lambda m: b"\x80\x02)" + b"2\x86" * 60 + b"}\x940N.", "nothing of it ran"),
    "nested for ever": (lambda m: b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "it is no Metadata"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_distributed_folder_that_claims_what_is_not_there(tmp_path, kind):
    change, text = DISTRIBUTED[kind]
    model, folder = small(), folder_of(tmp_path, change)
    before = values(model)
    with little_memory(1 << 30), pytest.raises(CheckpointError, match=text):
        weft.resume_from_checkpoint(folder, partial=False)
    assert torch.equal(values(model)["weight"], before["weight"])


def test_a_whole_distributed_folder_is_read(tmp_path):
    model = small()
    weft.resume_from_checkpoint(folder_of(tmp_path), partial=False)
    assert torch.equal(values(model)["weight"], torch.full((4, 4), 7.0))


def test_a_truncated_distributed_folder_is_an_error_of_weft(tmp_path):
    """PyTorch raises a BaseException there."""
    model, folder = small(), folder_of(tmp_path)
    os.truncate(folder / "__0_0.distcp", 50)
    with pytest.raises(CheckpointError, match="is truncated: it has 50 bytes"):
        weft.resume_from_checkpoint(folder, partial=False)
    assert not (values(model)["weight"] == 7).any()


def test_every_byte_of_a_distributed_tensor_counts(tmp_path):
    """Its archives have checksums, which PyTorch does not compare."""
    model, folder = small(), folder_of(tmp_path)
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    at = content.index(b"\0\0\xe0\x40" * 16)
    content[at + 3] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    before = values(model)
    with pytest.raises(CheckpointError, match="is altered: it does not fit its checksum"):
        weft.resume_from_checkpoint(folder, partial=False)
    assert torch.equal(values(model)["weight"], before["weight"])


@pytest.mark.parametrize("name", ["StorageMeta", "MetadataIndex", "TensorProperties"])
def test_metadata_writes_into_no_class(tmp_path, name):
    """The state of an object may be a pair, whose second part goes to its attributes, even if it is a class."""
    module = b"torch.distributed.checkpoint.metadata"
    build = b"c" + module + b"\n" + name.encode() + b"\n(N}X\x05\0\0\0weft_Nsb0."
    folder = folder_of(tmp_path, lambda metadata: b"\x80\x02" + build.replace(b"b0.", b"tb."))
    small()
    with pytest.raises(CheckpointError, match="nothing of it ran"):
        weft.resume_from_checkpoint(folder, partial=False)
    assert not hasattr(getattr(torch.distributed.checkpoint.metadata, name), "weft_")
    assert StorageMeta().save_id is None


# --- files of torch.save ----------------------------------------------------------------------------------------


def test_every_byte_of_a_torch_file_counts(tmp_path):
    model = small()
    torch.save({"weight": torch.full((4, 4), 7.0)}, tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[content.index(b"\0\0\xe0\x40" * 16) + 3] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="data/0 in it is altered: it does not fit its checksum"):
        weft.resume_from_checkpoint(tmp_path / "x.pt", partial=False)
    assert not (values(model)["weight"] == 7).any()


def test_a_torch_file_without_checksums_is_read(tmp_path):
    model = small()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.full((4, 4), 7.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    weft.resume_from_checkpoint(tmp_path / "x.pt", partial=False)
    assert (values(model)["weight"] == 7).all()


@pytest.mark.parametrize("value", [torch.empty(4, 4, device="meta"), torch.ones(4, 4).to_sparse()])
def test_tensors_without_numbers_change_nothing(tmp_path, value):
    model = small()
    before = values(model)
    torch.save({"weight": value}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a tensor without numbers of its own"):
        weft.resume_from_checkpoint(tmp_path / "x.pt", partial=False)
    assert torch.equal(values(model)["weight"], before["weight"])


# --- saves of weft's own --------------------------------------------------------------------------------------


def resealed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The index of a save changed, with the checksum that it then has."""
    index = json.loads((folder / "index.json").read_text())
    changed = change(index)
    text = changed if isinstance(changed, str) else json.dumps(index)
    (folder / "index.json").write_text(text)
    done = {"index_bytes": len(text.encode()), "index_sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "DONE").write_text(json.dumps(done))


def number_of(digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda index: json.dumps({**index, "number": "@"}).replace('"@"', "9" * digits)


@pytest.mark.parametrize(
    "content",
    ['{"index_bytes": Infinity, "index_sha256": ""}', '{"index_bytes": 1e400, "index_sha256": ""}', "[" * 900,
     '{"index_bytes": ' + "9" * 900 + ', "index_sha256": ""}', "\udcff", "{}", "null", "[]", '{"index_bytes": "1"}'],
)  # fmt: skip
def test_a_hostile_save_does_not_touch_the_others(tmp_path, content):
    model, before = saved(tmp_path, "good")
    (tmp_path / "other_partial").mkdir()
    (tmp_path / "other_partial" / "DONE").write_text(content, errors="surrogateescape")
    assert weft.resume_from_checkpoint(tmp_path) == {"number": 0}
    assert weft.resume_from_checkpoint(tmp_path, "good") == {"number": 0}
    assert weft.read_model(tmp_path).keys() == before.keys()
    weft.save_checkpoint(tmp_path, "next", model=model)
    assert weft.resume_from_checkpoint(tmp_path, "next", load_optimizer=False) is None
    with pytest.raises(CheckpointError, match="other_partial"):
        weft.resume_from_checkpoint(tmp_path, "other")


@pytest.mark.parametrize("digits", [19, 4000, 5000])
def test_a_number_of_many_digits_does_not_keep_others_from_saving(tmp_path, digits):
    model, _ = saved(tmp_path, "a")
    resealed(tmp_path / "a_partial", number_of(digits))
    weft.save_checkpoint(tmp_path, "b", model=model)
    with pytest.raises(CheckpointError, match=r"number: expected a whole number up to|thousands of digits"):
        weft.resume_from_checkpoint(tmp_path, "a")


def test_the_last_number_of_all_is_named(tmp_path):
    model, _ = saved(tmp_path, "a")
    resealed(tmp_path / "a_partial", lambda index: index.update(number=(1 << 63) - 1))
    with pytest.raises(
        CheckpointError, match="a_partial has the number 9223372036854775807, after which there is none"
    ):
        weft.save_checkpoint(tmp_path, "b", model=model)


def entry_of(index: dict[str, Any], path: str) -> list[Any]:
    entry: list[Any] = index["tensors"][path]
    return entry


def rank_of(index: dict[str, Any]) -> dict[str, Any]:
    rank: dict[str, Any] = index["content"]["ranks"]["0"]
    return rank


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a shape of 3000 digits": (
        lambda i: entry_of(i, "model/0.weight").__setitem__(2, [10**3000, 5]),
        "a whole number up to"
    ),
    "a shape of many dims": (lambda i: entry_of(i, "model/0.weight").__setitem__(2, [1] * 10**5), "up to 64 dims"),
    "a shape of nothing times all": (
        lambda i: entry_of(i, "model/0.weight").__setitem__(2, [2**62, 2**62, 0]),
        "less elements"
    ),
    "content of another kind": (lambda i: i.update(content={"ranks": [1]}), "did not write"),
    "no ranks": (lambda i: i["content"].pop("ranks"), "did not write"),
    "a rank that is a number": (lambda i: i["content"]["ranks"].update({"0": 3}), "did not write"),
    "an alias of nothing": (lambda i: i["content"]["model"]["aliases"].update(a="b"), "did not write"),
    "groups without names": (lambda i: i["content"]["optimizer"].update(groups=[{"values": {}}]), "did not write"),
    "groups that are numbers": (
        lambda i: i["content"]["optimizer"]["groups"][0].update(values=3),
        "in the place of a dict"
    ),
    "values that are numbers": (
        lambda i: i["content"]["optimizer_values"].update({"0.weight": 3}),
        "in the place of a dict"
    ),
    "random states that are none": (
        lambda i: rank_of(i).update(random=[[{"$bytes": "AAAA"}], None, None]),
        "did not write"
    ),
    "random states of another size": (
        lambda i: rank_of(i).update(random=[None, {"$tuple": [3, {"$tuple": [1]}, None]}, None]),
        "did not write"
    ),
    "user content of an unknown kind": (lambda i: i["content"].update(user={"$what": 1}), "unknown to this version"),
    "a device that is none": (
        lambda i: i["content"].update(user={"$device": "cuda:99999999999999999999"}),
        "cannot be read"
    ),
    "a tensor that is not there": (lambda i: i["content"].update(user={"$tensor": "user/9"}), "has no tensor"),
    "a tensor without a name": (lambda i: i["content"].update(user={"$tensor": ["a"]}), "cannot be read"),
    "numpy of another dtype": (
        lambda i: i["content"].update(user={"$numpy": ["model/0.weight", "O", [1]]}),
        "no dtype of numbers"
    ),
    "numpy of a huge shape": (
        lambda i: i["content"].update(user={"$numpy": ["model/0.weight", "f8", [2**40]]}),
        "cannot be read"
    ),
    "numpy of a text": (
        lambda i: i["content"].update(user={"$numpy": ["model/0.weight", "f8", "ab"]}),
        "cannot be read"
    ),
    "an optimizer without a step": (
        lambda i: [
            i["tensors"].update({path.replace("/step", "/other"): i["tensors"].pop(path)})
            for path in list(i["tensors"])
            if path.endswith("/step")
        ],
        "the optimizer does not take the state",
    ),
    "a deep value": (lambda i: i["content"].update(user=nested(400)), "100 levels deep"),
    "extra state of another kind": (lambda i: i["content"].update(extra=3), "in the place of a dict"),
}  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"$tuple": [value]}
    return value


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_holds_what_weft_did_not_write_changes_nothing(tmp_path, kind):
    model, optimizer = made()
    weft.save_checkpoint(tmp_path, "a", model=model, optimizer=optimizer, user_content={"number": 0})
    change, text = INDEXES[kind]
    resealed(tmp_path / "a_partial", change)
    train(model, optimizer)
    before = everything(model, optimizer)
    with little_memory(1 << 30), pytest.raises(CheckpointError, match=text):
        weft.resume_from_checkpoint(tmp_path, model=model, optimizer=optimizer)
    for name, value in everything(model, optimizer).items():
        assert torch.equal(value, before[name]), name


def everything(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"]
    found = {
        f"{number}.{key}": value.clone() for number, entry in states.items() for key, value in entry.items()
    }
    return {**values(model), **found, "random": torch.get_rng_state()}


@pytest.mark.parametrize("partition", [2, -7, "0", 10**30, None])
def test_a_plan_for_other_partitions_is_refused(partition):
    plan = {"units": [{"name": "0", "partition": partition}], "parameters": {}, "buffers": {}, "numpy": False}
    with pytest.raises(ValueError, match="a unit of its plan is on the partition .* of 2"):
        Plan.from_json(json.dumps(plan)).check(2)


class Refuses:
    """An object that takes no state, after another one has taken its own."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("no")


class Takes:
    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_an_object_that_refuses_its_state_changes_nothing(tmp_path):
    model, optimizer = made()
    takes, refuses = Takes(), Refuses()
    weft.save_checkpoint(tmp_path, "a", model=model, optimizer=optimizer, also={"one": takes, "two": refuses})
    train(model, optimizer)
    takes.value = 2
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=r"also\['two'\] does not take the state that was saved \(no\)"):
        weft.resume_from_checkpoint(tmp_path, also={"one": takes, "two": refuses})
    assert takes.value == 2
    for name, value in everything(model, optimizer).items():
        assert torch.equal(value, before[name]), name


def test_a_tensor_that_is_altered_changes_nothing_however_it_was_verified(tmp_path):
    model, optimizer = made()
    takes = Takes()
    weft.save_checkpoint(tmp_path, "a", model=model, optimizer=optimizer, also={"one": takes})
    train(model, optimizer)
    takes.value = 2
    group = optimizer.param_groups[0]
    group["lr"], group["of the script"] = 0.5, 1
    before, settings = everything(model, optimizer), {**group}
    index = json.loads((tmp_path / "a_partial" / "index.json").read_text())
    last = index["tensors"]["model/2.weight"]
    with open(tmp_path / "a_partial" / last[0], "r+b") as file:
        file.seek(last[3])
        byte = file.read(1)
        file.seek(last[3])
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="do not fit their checksum"):
        weft.resume_from_checkpoint(tmp_path, verify="sizes", random_states=False, also={"one": takes})
    for name, value in everything(model, optimizer).items():
        assert torch.equal(value, before[name]), name
    now = optimizer.param_groups[0]
    assert takes.value == 2 and {**now, "params": 0} == {**settings, "params": 0}


def test_a_save_without_an_optimizer_is_told(tmp_path, caplog):
    model, optimizer = made()
    weft.save_checkpoint(tmp_path, "a", model=model)
    weft.resume_from_checkpoint(tmp_path)
    assert "a_partial has no state of an optimizer, which begins anew" in caplog.text
    caplog.clear()
    weft.resume_from_checkpoint(tmp_path, load_optimizer=False)
    assert "begins anew" not in caplog.text


# --- links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["outside", "root/b"])
def test_a_save_that_is_a_link_is_refused(tmp_path, elsewhere):
    root = tmp_path / "root"
    saved(root, "a", "c")
    shutil.move(root / "c_partial", tmp_path / elsewhere)
    (root / "c_partial").symlink_to(tmp_path / elsewhere)
    assert weft.resume_from_checkpoint(root) == {"number": 0}
    with pytest.raises(CheckpointError, match="c_partial is a link, which checkpoints do not have"):
        weft.resume_from_checkpoint(root, "c")


def test_a_folder_of_older_scripts_that_is_a_link_is_refused(tmp_path):
    model, _ = made()
    (tmp_path / "outside").mkdir()
    torch.save(model.local_state_dict(), tmp_path / "outside" / "model_0_0.pt")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "t_partial").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="t_partial is a link"):
        weft.resume_from_checkpoint(tmp_path / "root", "t")


# --- what is saved can be read back -----------------------------------------------------------------------------


def test_numbers_of_any_length_come_back(tmp_path):
    model, _ = made()
    numbers = [2**62, 2**63, -(2**63) - 1, 10**5000]
    weft.save_checkpoint(tmp_path, "a", model=model, user_content=numbers)
    assert weft.resume_from_checkpoint(tmp_path) == numbers


def test_lists_that_could_not_be_read_back_are_not_saved(tmp_path, monkeypatch):
    model, _ = made()
    monkeypatch.setattr("weft.untrusted.MOST_VALUES", 20_000)
    with pytest.raises(CheckpointError, match="could not be read back.*save long lists as tensors"):
        weft.save_checkpoint(tmp_path, "a", model=model, user_content=[0] * 21_000)
    assert not (tmp_path / "a_partial").exists()


@pytest.mark.parametrize("text", ['{"number": Infinity, "files": {}}', '{"number": 1, "files": {"a": 5}}', "[" * 10**5,
                                  '{"number": ' + "9" * 4000 + ', "files": {}}'])  # fmt: skip
def test_a_hostile_manifest_does_not_touch_the_others(tmp_path, text):
    model, _ = made()
    weft.save_checkpoint(tmp_path, "a", partial=False, model=model)
    (tmp_path / "manifest_b.json").write_text(text)
    (tmp_path / "b").write_bytes(b"")
    weft.save_checkpoint(tmp_path, "c", partial=False, model=model)
    weft.resume_from_checkpoint(tmp_path, partial=False)
    with pytest.raises(
        CheckpointError, match=r"manifest_b.json is altered.*The newest one that is whole is 'c'"
    ):
        weft.resume_from_checkpoint(tmp_path, "b", partial=False)


@pytest.mark.parametrize("name", ["a", "user_content_a", "manifest_a.json", "newest"])
@pytest.mark.parametrize(
    "change", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"]
)
def test_a_file_that_never_ends_is_refused(tmp_path, name, change):
    model, _ = made()
    weft.save_checkpoint(tmp_path, "a", partial=False, model=model)
    (tmp_path / name).unlink()
    change(tmp_path / name)
    if name == "newest":  # there is one save only
        weft.resume_from_checkpoint(tmp_path, partial=False)
        return
    with pytest.raises(CheckpointError, match="no regular file|is altered"):
        weft.resume_from_checkpoint(tmp_path, "a", partial=False)


def test_the_sizes_of_zeros_are_kept(tmp_path):
    model, _ = made()
    weft.save_checkpoint(tmp_path, "a", model=model, user_content={"t": torch.empty(0, 5), "n": math.inf})
    found = weft.resume_from_checkpoint(tmp_path)
    assert found["t"].shape == (0, 5) and found["n"] == math.inf
