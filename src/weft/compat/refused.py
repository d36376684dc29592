"""Parts of the original that weft does not have: who imports one learns why, and what to do."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

from weft.errors import LaunchError, UsageError


class MissingPart(UsageError, ImportError):
    """An ``ImportError``, so that scripts that go another way without the part still do."""


class MissingModule(MissingPart, ModuleNotFoundError):
    """The same, for a module."""


def need_tensorflow(name: str) -> None:
    """Raise what an import of the TensorFlow half of the original gets where there is no TensorFlow."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingPart(
            f"{name} needs TensorFlow, which is not installed: pip install 'weft[tensorflow]', or use the script's "
            "PyTorch version, with smdistributed.modelparallel.torch or smdistributed.dataparallel.torch"
        )


def refuse_checkpoint_files(name: str) -> NoReturn:
    """Raise what moving the files of a checkpoint between machines gets."""
    raise MissingPart(
        f"{name} is not supported: save into a folder that all machines share, where any of them resumes"
    )


def refuse_unknown(module: str, name: str) -> NoReturn:
    """Raise what a look-up of a name that nobody knows gets."""
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: weft knows no such name of the original, and docs/migration.md "
        "lists what it has"
    )


def refuse_state(name: str) -> NoReturn:
    """Raise what a look-up of a name that ``smp.state`` does not have gets."""
    remedy = (
        "nothing has to be gathered here, state_dict() of the model and of the optimizer is whole"
        if name in ("param_index_to_name_tp_group", "param_name_to_index_tp_group")
        else "docs/migration.md lists what it has"
    )
    raise AttributeError(f"smp.state has no {name}: {remedy}")


def refuse_lonely_mpi(ranks: int) -> NoReturn:
    """Raise what ``from mpi4py import MPI`` gets where MPI knows nothing of the other ranks."""
    raise LaunchError(
        f"MPI sees one process here, and the job has {ranks}: weft run started them without MPI. Start them with "
        "weft run --engine mpirun, or leave mpi4py out: smp.rank() and torch.distributed need none"
    )
