"""``smp.state``: the settings of a job as scripts read them, for both frameworks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from weft.compat.modelparallel.parameters import Config, canonical, inputs_of, read
from weft.compat.refused import refuse_state
from weft.config import resolve, written
from weft.errors import ConfigError, UsageError
from weft.session import current

Translate = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@dataclass
class ModuleManager:
    """``translate_functions``: how names of a state change between a model and its tensor-parallel form: never."""

    translate_functions: list[Translate] = field(default_factory=list)


class Join(Protocol):
    """The functions by which a frontend of weft joins a job and leaves it."""

    def init(self, config: Mapping[str, Any] | None = None) -> None: ...

    def shutdown(self) -> None: ...


class State:
    """``smp.state``. ``join``: the frontend."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self.given: dict[str, Any] = {}
        self.module_manager = ModuleManager()
        self._cfg: Config | None = None
        self._launched: set[str] = set()

    def __getattr__(self, name: str) -> NoReturn:
        refuse_state(name)

    @property
    def initialized(self) -> bool:
        return current.is_initialized()

    @property
    def is_used(self) -> bool:
        """True if the script has called ``smp.init``."""
        return self._cfg is not None and current.is_initialized()

    @property
    def cfg(self) -> Config:
        """The settings by name, those of the original that weft ignores included."""
        if self._cfg is None or not current.is_initialized():
            raise UsageError("smp.state.cfg is known after smp.init()")
        return self._cfg

    def is_given(self, name: str) -> bool:
        """True if the script or its launch says what weft's setting of that name is."""
        return name in self._launched

    def init(self, config: Mapping[str, Any] | None = None) -> None:
        """Join the job. Harmless when repeated: a setting that is not given stays as it was.

        ``config``: settings by name; those of the launch (``SM_HP_MP_PARAMETERS``) win over it.
        """
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"the argument of init is of type {type(config).__name__}: write a dict, "
                'for example {"partitions": 2, "microbatches": 4}'
            )
        given = {**self.given, **canonical(config or {}, "the dict given to init")}
        parameters = read(given, os.environ)
        self._launched = parameters.own.keys() | written(os.environ)
        parameters.own.setdefault("inputs", inputs_of(parameters))
        if "memory_weight" not in parameters.own:
            parameters.own.setdefault("optimize", "memory")
        if current.is_initialized():
            present: Any = current.session()
            wanted = resolve(parameters.own, os.environ, present.place.world_size)
            meshes = [(s.partitions, s.placement_strategy) for s in (present.settings, wanted)]
            if meshes[0] != meshes[1] and not present.models:
                self._join.shutdown()  # nothing was made for the old mesh
        self._join.init(parameters.own)
        self.given = given
        self._cfg = Config(parameters, current.session().settings)
