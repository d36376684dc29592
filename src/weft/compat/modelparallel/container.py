"""Variables of SageMaker's containers that scripts read, as far as this machine has an answer to them.

    SM_HOSTS, SM_CURRENT_HOST            this host
    SM_NUM_GPUS, SM_NUM_CPUS             as many GPUs as there are ranks; the cores
    SM_MODEL_DIR, SM_OUTPUT_DATA_DIR     ``model`` and ``output`` in the working folder
    SM_USER_ARGS                         the script's arguments
    SM_NETWORK_INTERFACE_NAME            the loopback interface
    SAGEMAKER_INSTANCE_TYPE, ...         ``local_gpu``, as on a machine of one's own

Not the channels (``SM_CHANNEL_*``): where the data lies only the user knows.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FOLDERS = {"SM_MODEL_DIR": "model", "SM_OUTPUT_DATA_DIR": "output"}
"""The variables for results, each with its folder in the working folder."""


def container_environ(environ: Mapping[str, str], ranks: int, arguments: Sequence[str]) -> dict[str, str]:
    """The variables that ``environ`` lacks, for a job of ``ranks`` processes on this host."""
    host = socket.gethostname()
    known = {
        "SM_HOSTS": json.dumps([host]),
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": str(ranks),
        "SM_NUM_CPUS": str(os.cpu_count() or 1),
        "SM_USER_ARGS": json.dumps(list(arguments)),
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_CURRENT_INSTANCE_TYPE": "local_gpu",
        "SAGEMAKER_INSTANCE_TYPE": "local_gpu",
        **{name: str(Path.cwd() / folder) for name, folder in FOLDERS.items()},
    }
    return {name: value for name, value in known.items() if name not in environ}


@contextmanager
def folders(added: Mapping[str, str]) -> Iterator[None]:
    """Inside, the folders of these variables exist.

    A folder that was made for the job and stays empty goes with the job, unless another job uses it by then.
    """
    with ExitStack() as stack:
        for path in (Path(added[name]) for name in FOLDERS if name in added):
            with suppress(
                OSError
            ):  # a read-only folder, or a file of that name: the script's own error says so
                stack.enter_context(_folder(path))
        yield


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    made = not path.exists()
    path.mkdir(exist_ok=True)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if made:
                path.rmdir()
    finally:
        os.close(held)
