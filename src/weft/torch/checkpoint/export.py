"""A partial checkpoint as a whole model in other people's formats. One process does this; it needs no ``init``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.find import faults, in_order
from weft.checkpoint.folder import appearing
from weft.checkpoint.names import check_path
from weft.errors import CheckpointError, UsageError
from weft.torch.checkpoint.formats.sums import write_sums
from weft.torch.checkpoint.restore import model_names
from weft.torch.checkpoint.tensor_files import ShardReader, find_safetensors, stage
from weft.untrusted import translated

SHARD_BYTES = 5 * 10**9


def read_model(path: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model's state from a partial checkpoint, as a plain module's ``load_state_dict`` takes it.

    Args:
        path: Where the checkpoints are.
        tag: Which one; None takes the newest that is whole.
    """
    bad: list[str] = []
    root = check_path(path)
    with translated(f"{path} cannot be read", CheckpointError):
        for save in in_order(root, tag):
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

    Returns:
        ``target``. Beside a safetensors file ``<target>.sha256``, and in a folder ``SHA256SUMS``, have its checksums,
        which weft checks where it loads the model, and ``sha256sum -c`` too. A torch file has checksums in it.

    Raises:
        UsageError: ``target`` exists, or nothing can be at such a place.
        CheckpointError: The checkpoint is not whole, or ``target`` could not be written; nothing half is left.
    """
    where = check_path(target, "target")
    if format not in _WRITERS:
        raise UsageError(f"format is {format!r}: write one of {', '.join(_WRITERS)}")
    with translated(f"{where} cannot be written", CheckpointError):
        if where.exists():
            raise UsageError(f"{where} exists: remove it, or export to another place")
    state = read_model(path, tag)
    with appearing(where) as temporary:
        _WRITERS[format](state, temporary)
        if format == "safetensors":
            write_sums(temporary, where)
    return where


def _torch(state: dict[str, Tensor], target: Path) -> None:
    with open(target, "xb") as file:  # whose errors are the system's
        torch.save(state, file)


def _safetensors(state: dict[str, Tensor], target: Path) -> None:
    find_safetensors().save_file(stage(state, copy=False), target, {"format": "pt"})  # type: ignore[attr-defined]


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
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        alone = len(groups) == 1
        file = "model.safetensors" if alone else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _safetensors(group, target / file)
        places |= dict.fromkeys(group, file)
    if len(groups) > 1:
        total = sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    write_sums(target)


def _distributed(state: dict[str, Tensor], target: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves, as it was told to
        save(state, storage_writer=FileSystemWriter(target), no_dist=True)
    write_sums(target)


_WRITERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "huggingface": _huggingface,
    "distributed": _distributed,
}
