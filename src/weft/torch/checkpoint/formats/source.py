"""Whole models in other people's formats: each has its tensors' shapes and reads one tensor at a time.

    TorchFile       what torch.save wrote (.pt); weights only
    Safetensors     one file, or several with an index, as Hugging Face writes them
    Distributed     a folder of torch.distributed.checkpoint; see ``distributed_folder``
    InMemory        tensors that are there already

None of them runs code that a file brings along.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.names import is_safe, read_text
from weft.errors import CheckpointError
from weft.torch.checkpoint.formats.distributed_folder import METADATA, DistributedFolder
from weft.torch.checkpoint.formats.torch_file import is_archive, load_file
from weft.torch.checkpoint.tensor_files import find_safetensors
from weft.torch.tensors.state_names import fitting
from weft.untrusted import parse_json, regular, shown, shown_text, translated

_INDEXES = ("model.safetensors.index.json",)
_STATE_NAMES = ("model", "module", "state_dict")
_INDEX_LIMIT_BYTES = 100 << 20


class Source:
    """A whole model.

    Attributes:
        shapes: By the names of its tensors.
        checksums: Whether damaged numbers are noticed.
        doubts: Why its files may be of different saves.
    """

    shapes: Mapping[str, tuple[int, ...]]
    checksums = True
    doubts: Sequence[str] = ()

    def read(self, name: str) -> Tensor:
        """The tensor of a name, on the CPU."""
        raise NotImplementedError

    def check(self, name: str) -> None:
        """:class:`CheckpointError` if the tensor of a name cannot be read, or put into a model."""


class InMemory(Source):
    """A state that is there already."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def check(self, name: str) -> None:
        tensor = self.tensors[name]
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                f"{shown_text(name)} is a tensor without numbers of its own ({tensor.layout}, {tensor.dtype}): "
                "convert it before it is saved"
            )


class Renamed(Source):
    """Another source, with the names that a model has for its tensors."""

    def __init__(self, source: Source, wanted: Collection[str]) -> None:
        means = fitting(source.shapes, wanted)
        self._source = source
        self._names = {name: given for given, name in means.items()}
        self.shapes = {means[given]: shape for given, shape in source.shapes.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])

    def check(self, name: str) -> None:
        self._source.check(self._names[name])


class TorchFile(InMemory):
    """A file of ``torch.save``: a state, or a dict with the state under "model", "module" or "state_dict"."""

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        content = load_file(path, allow_pickle)
        super().__init__(find_state(content, path))
        self.checksums = is_archive(path)


def find_state(content: Any, path: Path) -> dict[str, Any]:
    """The model's state in the content of a file."""
    for key in _STATE_NAMES:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} holds no model's state: expected a dict of tensors by name, or one under model, module, state_dict"
        )
    return {str(name): value for name, value in content.items()}


class Safetensors(Source):
    """One safetensors file, or the files that an index names."""

    checksums = False

    def __init__(self, path: Path) -> None:
        find_safetensors()
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self._names(path):
            file = path.parent / name
            with translated(f"{file} is missing, damaged, or no safetensors file", CheckpointError):
                opened = safe_open(regular(file), "pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
                self.shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}

    @staticmethod
    def _names(path: Path) -> list[str]:
        if path.suffix != ".json":
            return [path.name]
        with translated(f"{path} is no index of safetensors files", CheckpointError):
            places = parse_json(read_text(path.parent, path.name, _INDEX_LIMIT_BYTES))["weight_map"]
            names = sorted(set(places.values()))
        unsafe = [name for name in names if not is_safe(name)]
        if unsafe:
            raise CheckpointError(
                f"{path} names {shown(unsafe[0])}, which is no file in its folder: do not use it"
            )
        return names

    def read(self, name: str) -> Tensor:
        with translated(f"{shown_text(name)} cannot be read from its safetensors file", CheckpointError):
            value: Tensor = self._files[name].get_tensor(name)
        return value


class Distributed(Source):
    """A folder of ``torch.distributed.checkpoint``; only the bytes of the tensors that are asked for are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = DistributedFolder(folder)
        self.doubts = self._folder.doubts()
        names = {key: self._inside(self._path(key)) for key in self._folder.shapes}
        if not any(names.values()):
            names = {key: key for key in names}
        # beside the model's lie the optimizer's tensors and the like
        self._keys = {name: key for key, name in names.items() if name}
        self.shapes = {name: self._folder.shapes[key] for name, key in self._keys.items()}

    def _path(self, key: str) -> tuple[str, ...]:
        """The keys of the nested dicts that a tensor was saved in, as far as the metadata says."""
        path = self._folder.paths[key]
        if len(path) > 1:
            return path
        first, _, rest = key.partition(".")
        if path or first not in _STATE_NAMES:
            return (key,)
        alone = all(other.startswith(f"{first}.") for other in self._folder.keys)
        return (first, rest) if alone else (key,)

    @staticmethod
    def _inside(path: tuple[str, ...]) -> str:
        """The name inside of the model's state, as in {"model": {...}} or {"app": {"model": {...}}}; else empty."""
        depth = next((depth for depth, part in enumerate(path[:2]) if part in _STATE_NAMES), len(path))
        return ".".join(path[depth + 1 :])

    def read(self, name: str) -> Tensor:
        return self._folder.read(self._keys[name])

    def check(self, name: str) -> None:
        self.read(name)


def open_source(path: Path, allow_pickle: bool = False) -> Source:
    """The whole model behind a path, by what lies there."""
    if path.is_dir():
        for name in _INDEXES:
            if (path / name).exists():
                return Safetensors(path / name)
        if (path / "model.safetensors").exists():
            return Safetensors(path / "model.safetensors")
        if (path / METADATA).exists():
            return Distributed(path)
        if (path / "pytorch_model.bin").exists():
            return TorchFile(path / "pytorch_model.bin", allow_pickle)
        raise CheckpointError(
            f"{path} has no model that can be read: expected model.safetensors, its index, .metadata or "
            "pytorch_model.bin"
        )
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return Safetensors(path)
    return TorchFile(path, allow_pickle)
