"""Lightning's ``accelerator="gpu"`` means the CPU where calls for CUDA do, one device for each rank of this host.

Lightning looks for GPUs itself, and installed packages see none. The Trainer and Fabric each have a
connector that reads what the script asked for.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from weft.compat.cuda import is_cpu
from weft.untrusted import MOST_RANKS, whole

CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""The modules of Lightning that have a connector, and its name."""
ENVIRONMENTS = "pytorch_lightning.plugins.environments"
"""The package that had a module for each environment until 1.9, by which SageMaker's guide imports its own."""
_GPUS = ("gpu", "cuda")
_ALL = ("auto", -1, "-1")


def install(module: ModuleType) -> None:
    """Change the connector of one of these modules, for scripts whose calls for CUDA mean the CPU."""
    connector = getattr(module, CONNECTORS[module.__name__])
    made = connector.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_cpu.installed():
            kwargs = _on_the_cpu(kwargs)
        made(self, *args, **kwargs)

    connector.__init__ = init


def former_module(environments: ModuleType) -> None:
    """Let scripts import `LightningEnvironment` from the module in which Lightning 1 had it."""
    now = sys.modules.get("lightning_fabric.plugins.environments.lightning")
    if now is not None:
        sys.modules.setdefault(f"{environments.__name__}.lightning_environment", now)


def _on_the_cpu(asked: dict[str, Any]) -> dict[str, Any]:
    """The accelerator and devices that a script asked for, with CPUs for GPUs.

    A strategy that has an accelerator of its own gets the same.
    """
    strategy, accelerator, devices = (
        asked.get(name, "auto") for name in ("strategy", "accelerator", "devices")
    )
    on_strategy = getattr(strategy, "_accelerator", None)
    if accelerator not in _GPUS and on_strategy not in _GPUS:
        return asked
    if on_strategy in _GPUS:
        strategy._accelerator = "cpu"
    if isinstance(devices, list):
        devices = len(devices)
    elif devices in _ALL:
        devices = whole(os.environ.get("LOCAL_WORLD_SIZE", ""), MOST_RANKS) or 1
    return {**asked, "accelerator": "cpu" if accelerator in _GPUS else accelerator, "devices": devices}
