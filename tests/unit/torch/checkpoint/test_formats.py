"""Other people's formats: written for them, read from them, and never run."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import weft.torch as weft
from tests.training import own_loss, step_of
from weft.errors import CheckpointError, UsageError

from .training import assert_equal, made, saved, train, values

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", ["torch", "safetensors", "huggingface", "distributed"])
def test_exports_are_read_by_their_programs_and_by_weft(tmp_path, format, monkeypatch):
    model, expected = saved(tmp_path / "saves", "a")
    monkeypatch.setattr("weft.torch.checkpoint.export.SHARD_BYTES", 100)
    target = weft.export_checkpoint(tmp_path / "saves", tmp_path / "out", format)
    if format == "torch":
        found = torch.load(target, weights_only=True)
    elif format == "safetensors":
        found = safetensors.torch.load_file(target)
        target = target.rename(tmp_path / "out.safetensors")
    elif format == "huggingface":
        places = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(places.values())) > 1
        found = {name: safetensors.torch.load_file(target / file)[name] for name, file in places.items()}
    else:
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(found, checkpoint_id=target, no_dist=True)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    weft.resume_from_checkpoint(target, partial=False, model=model)
    assert_equal(model, expected)
    with pytest.raises(UsageError, match="exists: remove it"):
        weft.export_checkpoint(tmp_path / "saves", target, format)


@pytest.mark.parametrize("format", ["safetensors", "huggingface", "distributed"])
def test_what_was_exported_is_checked(tmp_path, format, caplog):
    model, expected = saved(tmp_path / "saves", "a")
    target = weft.export_checkpoint(tmp_path / "saves", tmp_path / "out", format)
    if format == "safetensors":
        sums, file = tmp_path / "out.sha256", target
        with pytest.raises(CheckpointError):  # the ending tells the format
            weft.resume_from_checkpoint(target, partial=False, model=model)
        file = target = target.rename(tmp_path / "out.safetensors")
        sums = sums.rename(tmp_path / "out.safetensors.sha256")
        sums.write_text(sums.read_text().replace("out", "out.safetensors"))
    else:
        sums = target / "SHA256SUMS"
        file = target / {"huggingface": "model.safetensors", "distributed": "__0_0.distcp"}[format]
    assert subprocess.run(["sha256sum", "--check", sums.name], cwd=sums.parent).returncode == 0
    with caplog.at_level("INFO", "weft"):
        weft.resume_from_checkpoint(target, partial=False, model=model)
    assert "has no checksums" not in caplog.text and "two saves" not in caplog.text
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    with pytest.raises(CheckpointError, match="does not fit its checksum in .* damaged, or of another save"):
        weft.resume_from_checkpoint(target, partial=False, model=model)
    assert not any(value.any() for value in values(model).values())
    for told in ("nonsense", f"{'0' * 64}  ../{file.name}", "\0" * 70):
        sums.write_text(told)
        with pytest.raises(CheckpointError, match="has the line .* which is no checksum of a file beside it"):
            weft.resume_from_checkpoint(target, partial=False, model=model)
    sums.write_text(f"{'0' * 64}  gone")
    with pytest.raises(CheckpointError, match="gone cannot be read"):
        weft.resume_from_checkpoint(target, partial=False, model=model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_with_files_of_two_saves_is_told(tmp_path, caplog):
    model, expected = saved(tmp_path / "saves", "a")
    folder = tmp_path / "out"

    def told():
        caplog.clear()
        weft.resume_from_checkpoint(folder, partial=False, model=model)
        return caplog.text

    dcp.save(dict(expected), checkpoint_id=folder, no_dist=True)
    assert "two saves" not in told()
    shard, metadata = folder / "__0_0.distcp", folder / ".metadata"
    os.utime(shard, (metadata.stat().st_atime, metadata.stat().st_mtime + 60))
    assert "may hold files of two saves" in told() and "__0_0.distcp is 60 s newer than .metadata" in told()
    os.utime(shard, (0, 0))
    shard.write_bytes(shard.read_bytes() + b"more")
    assert "__0_0.distcp has 4 bytes more than .metadata says" in told()
    os.truncate(shard, shard.stat().st_size - 4)
    os.utime(shard, (0, 0))
    (folder / "__1_0.distcp").write_bytes(b"")
    assert "__1_0.distcp is not in .metadata" in told()


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def gpt2(transformers, seed):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=40)
    return transformers.GPT2LMHeadModel(config)


def wrapped_gpt2(transformers, seed):
    net = gpt2(transformers, seed)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = step_of(own_loss)
    step(model, torch.randint(40, (4, 8)))
    optimizer.step()
    return net, model, optimizer


def assert_same_net(net, other):
    state = other.state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_transformers_loads_the_exports(tmp_path, transformers, monkeypatch):
    net, model, optimizer = wrapped_gpt2(transformers, 0)
    weft.save_checkpoint(tmp_path / "saves", "a", model=model, optimizer=optimizer)
    for limit in (5 * 10**9, 10_000):
        monkeypatch.setattr("weft.torch.checkpoint.export.SHARD_BYTES", limit)
        folder = weft.export_checkpoint(tmp_path / "saves", tmp_path / f"hf-{limit}", "huggingface")
        net.config.save_pretrained(folder)
        assert (len(list(folder.glob("model-*.safetensors"))) > 1) == (limit == 10_000)
        other, told = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert_same_net(net, other)
        assert other.lm_head.weight is other.transformer.wte.weight
    other = gpt2(transformers, 1)
    file = weft.export_checkpoint(tmp_path / "saves", tmp_path / "plain.pt", "torch")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same_net(net, other)
    other = gpt2(transformers, 1)
    folder = weft.export_checkpoint(tmp_path / "saves", tmp_path / "dcp", "distributed")
    dcp.load(other.state_dict(), checkpoint_id=folder, no_dist=True)
    assert_same_net(net, other)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_transformers_saved_is_loaded(tmp_path, transformers):
    theirs = gpt2(transformers, 1)
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 1
    torch.save(theirs.state_dict(), tmp_path / "plain.pt")
    torch.save({"state_dict": theirs.state_dict(), "epoch": 3}, tmp_path / "lightning.ckpt")
    adam = torch.optim.Adam(theirs.parameters())
    nested = {"model": theirs.state_dict(), "optimizer": adam.state_dict()}
    dcp.save(theirs.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    dcp.save(nested, checkpoint_id=tmp_path / "nested", no_dist=True)
    dcp.save({"app": nested}, checkpoint_id=tmp_path / "app", no_dist=True)
    for name in ("one", "several", "plain.pt", "lightning.ckpt", "flat", "nested", "app"):
        net, model, _ = wrapped_gpt2(transformers, 0)
        weft.resume_from_checkpoint(tmp_path / name, partial=False, model=model)
        assert_same_net(theirs, net)
        assert net.lm_head.weight is net.transformer.wte.weight


@pytest.mark.parametrize("suffix", ["0", "0_0", "0_0_0"])
def test_old_partial_files_are_read(tmp_path, suffix):
    model, optimizer = made()
    expected = values(model)
    folder = tmp_path / "t1_partial"
    folder.mkdir()
    torch.save(model.local_state_dict(), folder / f"model_{suffix}.pt")
    torch.save(optimizer.local_state_dict(), folder / f"optimizer_{suffix}.pt")
    torch.save({"step": 7}, folder / "user_content.pt")
    (tmp_path / "newest").write_text("t1")
    steps = optimizer.state[next(iter(model.parameters()))]["step"].item()
    train(model, optimizer)
    assert weft.resume_from_checkpoint(tmp_path) == {"step": 7}
    assert_equal(model, expected)
    assert optimizer.state[next(iter(model.parameters()))]["step"].item() == steps
    torch.save({"a": 1}, tmp_path / f"single_{suffix}")
    assert weft.load(str(tmp_path / "single")) == {"a": 1}


def test_save_and_load(tmp_path):
    weft.save({"a": torch.ones(2)}, str(tmp_path / "x"))
    weft.save([1], str(tmp_path / "whole"), partial=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "x_0_0"]
    assert torch.equal(weft.load(str(tmp_path / "x"))["a"], torch.ones(2))
    assert weft.load(str(tmp_path / "whole"), partial=False) == [1]
    with pytest.raises(CheckpointError, match=r"y_0_0 is missing, for rank 0; there is no such file"):
        weft.load(str(tmp_path / "y"))
