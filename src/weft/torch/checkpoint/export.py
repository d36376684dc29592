"""A partial checkpoint as a whole model in other people's formats. One process does this; it needs no ``init``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.find import faults, in_order
from weft.checkpoint.folder import flush_file, flush_folder, replace_flushed
from weft.errors import CheckpointError, UsageError
from weft.foreign import translated
from weft.torch.checkpoint.restore import model_names
from weft.torch.checkpoint.tensor_files import ShardReader, find_safetensors, stage

SHARD_BYTES = 5 * 10**9


def read_model(path: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model's state from a partial checkpoint, as a plain module's ``load_state_dict`` takes it.

    Args:
        path: Where the checkpoints are.
        tag: Which one; None takes the newest that is whole.
    """
    bad: list[str] = []
    with translated(f"{path} cannot be read", CheckpointError):
        for save in in_order(Path(path), tag):
            if save.index is None:
                bad.append(save.fault)
                continue
            wrong = faults(save.folder, save.index)
            if wrong:
                bad += wrong
                continue
            reader = ShardReader(save.folder, save.index)
            aliases = save.index.content.get("model", {}).get("aliases", {})
            names = model_names(save.index)
            found = {name: reader.read(f"model/{name}") for name in names if name not in aliases}
            reader.close()
            return {name: found[aliases.get(name, name)] for name in names}
    which = "" if tag is None else f" with the tag {tag!r}"
    raise CheckpointError(
        f"{path} has no checkpoint{which} that is whole" + "".join(f"; {text}" for text in bad)
    )


def export_checkpoint(path: str | Path, target: str | Path, format: str, tag: str | None = None) -> Path:
    """Write the model of a partial checkpoint as one that other programs read.

    Args:
        path: Where the checkpoints are.
        target: The file ("torch", "safetensors") or the folder ("huggingface", "distributed") to make; it must not
            exist.
        format: "torch" (``torch.load`` reads it), "safetensors", "huggingface" (``model.safetensors``, in several
            files with an index above 5 GB), or "distributed" (``torch.distributed.checkpoint``).
        tag: Which checkpoint; None takes the newest that is whole.
    """
    target = Path(target)
    if format not in _WRITERS:
        raise UsageError(f"format is {format!r}: write one of {', '.join(_WRITERS)}")
    if target.exists():
        raise UsageError(f"{target} exists: remove it, or export to another place")
    state = read_model(path, tag)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[format](state, target)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error}") from error
    return target


def _torch(state: dict[str, Tensor], target: Path) -> None:
    torch.save(state, target)
    flush_file(target)


def _safetensors(state: dict[str, Tensor], target: Path) -> None:
    find_safetensors().save_file(stage(state, copy=False), target, {"format": "pt"})  # type: ignore[attr-defined]
    flush_file(target)


def _huggingface(state: dict[str, Tensor], target: Path) -> None:
    """Write a folder as Hugging Face does, tied tensors once; the model's configuration is not known here."""
    once = {id(tensor): name for name, tensor in reversed(state.items())}
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(once.values(), key=list(state).index):
        added = state[name].numel() * state[name].element_size()
        if size and size + added > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = state[name]
        size += added
    target.mkdir()
    if len(groups) == 1:
        _safetensors(groups[0], target / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _safetensors(group, target / file)
        places |= dict.fromkeys(group, file)
    total = sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    replace_flushed(target / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    flush_folder(target)


def _distributed(state: dict[str, Tensor], target: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves, as it was told to
        save(state, storage_writer=FileSystemWriter(target), no_dist=True)


_WRITERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "huggingface": _huggingface,
    "distributed": _distributed,
}
