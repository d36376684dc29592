"""The whole model as a file that plain TensorFlow reads: all partitions' variables on the first rank, which writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint.folder import explain
from weft.errors import CheckpointError, UsageError
from weft.session.collectives import agree_on
from weft.tensorflow import private
from weft.tensorflow.checkpoint.tensor_files import array_of
from weft.tensorflow.session.session import Session, free_others, is_here, session


def save_model(model: Any, save_path: str | Path) -> None:
    """Write the whole model; every rank calls this, outside of a step.

    ``save_path``: a folder, which becomes a SavedModel; or a file that ends in ``.keras``, for a model that was handed
    over to ``DistributedModel``. What is written is the Keras model, and needs no weft to be loaded.

    Raises:
        UsageError: On every rank: it cannot be written in that form.
        CheckpointError: On the first rank: the disk does not take it; PeerError with its text on the others.
    """
    joined, path = session(), Path(save_path)
    check_loadable(model, path)
    with joined.doing("save_model()"), gathered(joined, model):
        agree_on(joined, joined.port(), lambda: _write(model, path), "save_model()")


def check_loadable(model: Any, path: Path) -> None:
    """Refuse a file of a whole model that plain Keras could not load.

    Raises:
        UsageError: The model's class is one of weft.
    """
    if path.suffix in (".keras", ".h5") and model.module is model:
        raise UsageError(
            f"{type(model).__name__} derives from DistributedModel, so a {path.suffix} file could not be loaded "
            "without weft: leave the suffix out in model.save_model(path) to get a SavedModel, write the weights alone "
            "(save_weights), or hand a Keras model over to DistributedModel"
        )


def _write(model: Any, path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with model.whole():
            if path.suffix == ".keras":
                model.module.save(path)
            else:
                model.module.export(str(path), verbose=False)
    except OSError as error:
        raise CheckpointError(f"the model was not saved: {explain(error, path.parent)}") from error
    return ""


@contextmanager
def gathered(joined: Session, model: Any) -> Iterator[None]:
    """Inside, all variables of the model have their values on the first rank; the ranks of the first pipeline work
    together for that. Afterwards it gives up again what it did not have."""
    lacked = []
    if joined.position("rdp") == 0:
        lacked = gather(joined, model)
    try:
        yield
    finally:
        if lacked:
            free_others(joined.models)


def gather(joined: Session, model: Any) -> list[Any]:
    """Bring all variables' values to the first rank of the pipeline; those that had no value there.

    Every rank of the pipeline calls this.
    """
    here, ranks, port = joined.position("pp"), joined.peers("pp"), joined.port("pp")
    lacked = []
    for variable in model.all_variables():
        owner = model.owner_of(variable) or 0
        if owner == 0:
            continue
        kept = private.underlying(variable)
        content = array_of(variable).tobytes() if owner == here else b""
        content = port.broadcast_bytes(content, ranks[owner])
        if here == 0:
            if not is_here(variable):
                lacked.append(variable)
            variable.assign(np.frombuffer(content, kept.dtype.as_numpy_dtype).reshape(kept.shape))
    return lacked
