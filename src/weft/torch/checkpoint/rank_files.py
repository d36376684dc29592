"""``save`` and ``load``: single files as ``torch.save`` writes them, one for the whole job or one for each rank.

A partial file's name ends with its rank, in one of three ways, the last of which is for states that replicas share:

    <name>_<mp_rank>    <name>_<pp_rank>_<tp_rank>    <name>_<pp_rank>_<tp_rank>_<rdp_rank>
"""

from __future__ import annotations

from typing import Any

import torch

from weft.checkpoint.folder import appearing
from weft.checkpoint.names import check_path
from weft.errors import CheckpointError, UsageError
from weft.session import ranks
from weft.torch.checkpoint.formats.torch_file import load_file


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """``torch.save``, to ``f`` or, if ``partial``, to this rank's own file; it appears at once or not at all.

    Args:
        obj: What to save.
        f: The path, without the part that names the rank.
        partial: Whether each rank saves its own. Call it on the ranks with ``rdp_rank() == 0`` then.
        pickle_module: Must be left out; :func:`load` reads weights only.
        pickle_protocol: As for ``torch.save``.
        v3: Whether each replica has a file too.
    """
    path = check_path(f, "f")
    if pickle_module is not None:
        raise UsageError("save takes no pickle_module: load reads weights only")
    if partial:
        path = path.with_name(path.name + suffixes()[0 if v3 else 1])
    with appearing(path) as temporary, open(temporary, "xb") as file:
        torch.save(obj, file, pickle_protocol=pickle_protocol)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    *,
    allow_pickle: bool = False,
    back_compat: bool = False,
    **options: Any,
) -> Any:
    """The object that :func:`save` or ``torch.save`` wrote; every rank calls this.

    Args:
        f: The path, without the part that names the rank.
        map_location: As for ``torch.load``.
        pickle_module: Must be left out: nothing that runs code is read.
        partial: Whether to read this rank's own file, in any of the namings.
        allow_pickle: Whether objects whose loading runs code may be read.
        back_compat: Accepted; all namings are tried anyway.
        options: Further arguments of ``torch.load``.

    Raises:
        CheckpointError: The file is missing or damaged, or holds objects whose loading runs code.
    """
    path = check_path(f, "f")
    if pickle_module is not None:
        raise UsageError(
            "load takes no pickle_module: pass allow_pickle=True if you trust whoever wrote the file"
        )
    options.pop("weights_only", None)
    if partial:
        tried = [path.with_name(path.name + suffix) for suffix in suffixes()]
        found = next((candidate for candidate in tried if candidate.exists()), None)
        if found is None:
            there = sorted(other.name for other in path.parent.glob(f"{path.name}*"))
            raise CheckpointError(
                f"{tried[1]} is missing, for rank {ranks.rank()}; there is {', '.join(there) or 'no such file'}. "
                "Partial files fit the number of partitions that wrote them; a whole one needs partial=False"
            )
        path = found
    return load_file(path, allow_pickle, map_location=map_location, **options)


def suffixes() -> list[str]:
    """The endings that the name of this rank's file may have, the most exact one first."""
    place = f"_{ranks.pp_rank()}_{ranks.tp_rank()}"
    return [f"{place}_{ranks.rdp_rank()}", place, f"_{ranks.mp_rank()}"]
