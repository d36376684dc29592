"""Settings of the second version, as ``tsm.init`` takes and checks them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.compat.variables import DEFAULTS, PARAMETERS
from weft.errors import ConfigError, FormatError
from weft.untrusted import parse_json, shown_text

DEGREES = {
    "tensor_parallel_degree": "cuts layers over ranks",
    "context_parallel_degree": "cuts sequences over ranks",
    "expert_parallel_degree": "spreads experts over ranks",
}


@dataclass(frozen=True)
class Settings:
    """The settings with their defaults. Only the first one changes what happens here."""

    hybrid_shard_degree: int = 0
    sm_activation_offloading: bool = False
    activation_loading_horizon: int = 2
    fsdp_cache_flush_warnings: bool = False
    allow_empty_shards: bool = False
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    random_seed: int = 12345


def read(config: Mapping[str, Any] | None, ranks: int) -> Settings:
    """The settings of a job: those given, or else those of ``SM_HP_MP_PARAMETERS``."""
    given = _of_the_launch() if config is None else dict(config)
    known = {field.name: type(field.default) for field in fields(Settings)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"torch.sagemaker knows no setting {name!r}: delete it, or take one of {', '.join(known)}"
            )
        wanted = known[name]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(
                f"{name} is {value!r}: give {'true or false' if wanted is bool else 'a whole number'}"
            )
    settings = Settings(**given)
    for name, what in DEGREES.items():
        degree = getattr(settings, name)
        if degree != 1:
            raise ConfigError(
                f"{name} is {degree}: torch.sagemaker trains with FSDP alone here, so set it to 1, or write the loop "
                f"with weft.torch.DistributedModel and weft.torch.step, whose setting {name} {what}"
            )
    degree = settings.hybrid_shard_degree
    if degree < 0 or (degree and ranks % degree):
        raise ConfigError(
            f"hybrid_shard_degree is {degree}: give 0, or a number that divides the {ranks} ranks"
        )
    if settings.activation_loading_horizon < 1:
        raise ConfigError(
            f"activation_loading_horizon is {settings.activation_loading_horizon}: give a number from 1 on"
        )
    return settings


def _of_the_launch() -> dict[str, Any]:
    text = "" if os.environ.get(DEFAULTS) else os.environ.get(PARAMETERS, "").strip()
    if text and os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        content = parse_json(text or "{}", f"{PARAMETERS} is not JSON")
    except FormatError as error:
        raise ConfigError(f"{error}; leave it out, or write an object") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{PARAMETERS} holds {shown_text(json.dumps(content))}: leave it out, or write an object"
        )
    return content
