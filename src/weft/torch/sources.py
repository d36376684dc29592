"""Whole models in other people's formats: each tells its tensors' shapes and reads one tensor at a time.

    TorchFile       what torch.save wrote (.pt); weights only
    Safetensors     one file, or several with an index, as Hugging Face writes them
    Distributed     a folder of torch.distributed.checkpoint; its metadata through an unpickler that knows few names
    OldPartial      a folder of model_<rank>.pt files, in each of the old namings; see ``old_partial``

None of them runs code that a file brings along.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.names import is_safe, read_text
from weft.errors import CheckpointError
from weft.torch.content import named_dtype
from weft.torch.optimizer import MASTERS, SCALE
from weft.torch.shard_file import safetensors
from weft.torch.state_names import fitting

_INDEXES = ("model.safetensors.index.json",)
_METADATA = ".metadata"
_STATE_NAMES = ("model", "module", "state_dict")
_INDEX_LIMIT_BYTES = 100 << 20
_METADATA_LIMIT_BYTES = 1 << 30

# All that a checkpoint's metadata is made of. Anything else is refused, and so nothing in it can run code.
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}  # fmt: skip


class Source:
    """A whole model. ``shapes``: of its tensors, by name."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """The tensor of a name, on the CPU."""
        raise NotImplementedError

    def rest(self) -> Mapping[str, Any]:
        """What the source holds besides the tensors."""
        return {}


class InMemory(Source):
    """A state that is there already."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


class Renamed(Source):
    """Another source, with the names that a model has for its tensors."""

    def __init__(self, source: Source, wanted: Collection[str]) -> None:
        means = fitting(source.shapes, wanted)
        self._source = source
        self._names = {name: given for given, name in means.items()}
        self.shapes = {means[given]: shape for given, shape in source.shapes.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])


class TorchFile(InMemory):
    """A file of ``torch.save``: a state, or a dict with the state under "model", "module" or "state_dict"."""

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        content = load_file(path, allow_pickle)
        super().__init__(find_state(content, path))


def read_torch_file(file: Any, **options: Any) -> Any:
    """``torch.load``, without the warning of PyTorch 2.14 and later that it checks sparse tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(file, **options)


def load_file(path: Path, allow_pickle: bool = False, **options: Any) -> Any:
    """What ``torch.save`` wrote; tensors stay in the file until they are used, where the file allows that."""
    options.setdefault("map_location", "cpu")
    try:
        try:
            return read_torch_file(path, weights_only=not allow_pickle, mmap=True, **options)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return read_torch_file(path, weights_only=not allow_pickle, **options)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read by this user: give it the right to read") from error
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is damaged, or holds objects whose loading runs code: it was not loaded ({reason}). If you trust "
            "whoever wrote it, pass allow_pickle=True"
        ) from error
    except (
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        OSError,
        AttributeError,
        IndexError,
        TypeError,
    ) as error:
        raise CheckpointError(f"{path} is no whole file of torch.save: {error}") from error


def find_state(content: Any, path: Path) -> dict[str, Any]:
    """The model's state in what a file held."""
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

    def __init__(self, path: Path) -> None:
        safetensors()
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self._names(path):
            file = path.parent / name
            try:
                opened = safe_open(file, "pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
                self.shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{file} is missing, damaged, or no safetensors file: {error}"
                ) from error

    @staticmethod
    def _names(path: Path) -> list[str]:
        if path.suffix != ".json":
            return [path.name]
        try:
            places = json.loads(read_text(path.parent, path.name, _INDEX_LIMIT_BYTES))["weight_map"]
            names = sorted(set(places.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is no index of safetensors files") from error
        unsafe = [name for name in names if not is_safe(name)]
        if unsafe:
            raise CheckpointError(
                f"{path} names {unsafe[0]!r}, which is no file in its folder: do not use it"
            )
        return names

    def read(self, name: str) -> Tensor:
        value: Tensor = self._files[name].get_tensor(name)
        return value


class MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of ``torch.distributed.checkpoint``, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # Python 3.13 calls pathlib so
        if name in _METADATA_NAMES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return named_dtype(name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


class Distributed(Source):
    """A folder of ``torch.distributed.checkpoint``; only the bytes of the tensors that are asked for are read."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

        metadata = read_metadata(folder)
        self.folder = folder
        entries = metadata.state_dict_metadata
        if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
            raise CheckpointError(f"{folder / _METADATA} is no metadata of torch.distributed.checkpoint")
        files = [info.relative_path for info in (metadata.storage_data or {}).values()]
        unsafe = [name for name in files if not is_safe(name)]
        if unsafe:
            raise CheckpointError(f"{folder / _METADATA} names {unsafe[0]!r}, which is no file in its folder")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()

        class Reader(FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
                return metadata

        self._reader = Reader(folder)
        found = {key: meta for key, meta in entries.items() if isinstance(meta, TensorStorageMetadata)}
        names = {key: self._inside(self._path(metadata, key)) for key in found}
        if not any(names.values()):
            names = {key: key for key in found}
        self._keys = {
            name: (key, found[key]) for key, name in names.items() if name
        }  # beside the model's lie the optimizer's tensors and the like
        self.shapes = {name: tuple(meta.size) for name, (_, meta) in self._keys.items()}

    @staticmethod
    def _path(metadata: Any, key: str) -> tuple[str, ...]:
        """The keys of the nested dicts that a tensor was saved in, as far as the metadata tells."""
        told = metadata.planner_data
        path = told.get(key) if isinstance(told, dict) else None
        if isinstance(path, tuple) and len(path) > 1:
            return tuple(map(str, path))
        first, _, rest = key.partition(".")
        if path or first not in _STATE_NAMES:
            return (key,)
        alone = all(other.startswith(f"{first}.") for other in metadata.state_dict_metadata)
        return (first, rest) if alone else (key,)

    @staticmethod
    def _inside(path: tuple[str, ...]) -> str:
        """The name inside of the model's state, as in {"model": {...}} or {"app": {"model": {...}}}; else empty."""
        depth = next((depth for depth, part in enumerate(path[:2]) if part in _STATE_NAMES), len(path))
        return ".".join(path[depth + 1 :])

    def read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint import load

        key, meta = self._keys[name]
        target = {key: torch.empty(meta.size, dtype=meta.properties.dtype)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that one process loads, as it was told to
                load(target, storage_reader=self._reader, no_dist=True)
        except Exception as error:  # whatever torch makes of a damaged file
            raise CheckpointError(f"{self.folder}: {key} cannot be read: {error}") from error
        return target[key]


def read_metadata(folder: Path) -> Any:
    """The metadata of a ``torch.distributed.checkpoint`` folder."""
    path = folder / _METADATA
    try:
        if path.stat().st_size > _METADATA_LIMIT_BYTES:
            raise CheckpointError(f"{path} has more than {_METADATA_LIMIT_BYTES} bytes")
        return MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler fails in any way
        raise CheckpointError(
            f"{path} is damaged, or holds what does not belong into a checkpoint's metadata; nothing of it ran: {error}"
        ) from error


class OldPartial(InMemory):
    """``model_<rank>.pt`` files, each a pipeline rank's part; ranks named as in any version. ``wanted``: the names that
    the model has for its tensors."""

    def __init__(self, folder: Path, allow_pickle: bool = False, wanted: Collection[str] = ()) -> None:
        self.folder = folder
        self.allow_pickle = allow_pickle
        self.held: dict[str, set[str]] = {}
        merged: dict[str, Any] = {}
        for path in sorted(folder.glob("model_*.pt")):
            part = find_state(load_file(path, allow_pickle), path)
            part = {name: part[given] for given, name in fitting(part, wanted).items()}
            self.held[path.stem.removeprefix("model_")] = set(part)
            merged |= part
        super().__init__(merged)

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's whole state, or None; numbers are those of the parameters in the groups' order."""
        merged: dict[str, Any] | None = None
        for path in sorted(self.folder.glob("optimizer_*.pt")):
            content = load_file(path, self.allow_pickle)
            if not isinstance(content, Mapping) or "param_groups" not in content or "state" not in content:
                raise CheckpointError(f"{path} holds no optimizer's state with param_groups and state")
            if merged is None:
                merged = {"param_groups": content["param_groups"], "state": {}, MASTERS: {}}
            merged["state"] |= content["state"]
            merged[MASTERS] |= content.get(MASTERS, {})
            if SCALE in content:
                merged[SCALE] = content[SCALE]
        return merged

    def fp16_states(self) -> dict[str, Any]:
        """What the files beside the optimizer's hold, by the rank in their name."""
        paths = sorted(self.folder.glob("fp16_states_*.pt"))
        return {path.stem.removeprefix("fp16_states_"): load_file(path, self.allow_pickle) for path in paths}

    def user_content(self) -> Any:
        path = self.folder / "user_content.pt"
        return load_file(path, self.allow_pickle) if path.exists() else None


def open_source(path: Path, allow_pickle: bool = False) -> Source:
    """The whole model behind a path, by what lies there."""
    if path.is_dir():
        for name in _INDEXES:
            if (path / name).exists():
                return Safetensors(path / name)
        if (path / "model.safetensors").exists():
            return Safetensors(path / "model.safetensors")
        if (path / _METADATA).exists():
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
