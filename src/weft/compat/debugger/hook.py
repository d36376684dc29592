"""`DebuggerHookConfig` and what belongs to it: which tensors are to be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectionConfig:
    """A group of tensors: its name, and parameters as texts."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DebuggerHookConfig:
    """The groups of tensors to save, and where."""

    s3_output_path: str | None = None
    container_local_output_path: str | None = None
    hook_parameters: Mapping[str, str] | None = None
    collection_configs: Sequence[CollectionConfig] = ()


@dataclass(frozen=True)
class TensorBoardOutputConfig:
    """Where TensorBoard's files are to be."""

    s3_output_path: str
    container_local_output_path: str | None = None
