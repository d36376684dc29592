"""Checksums beside files of formats that have none in them, as ``sha256sum`` writes and checks them.

<file>.sha256          of one file
<folder>/SHA256SUMS    of the files of a folder
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from weft.checkpoint.folder import replace_flushed
from weft.checkpoint.names import is_safe
from weft.errors import CheckpointError
from weft.untrusted import read_limited, regular, shown, translated

SUMS = "SHA256SUMS"
_LIMIT_BYTES = 16 << 20
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_sums(written: Path, final: Path | None = None) -> None:
    """Write the checksums of a file, or of the files of a folder. ``final``: the file that it is going to be."""
    if written.is_dir():
        files = {each.name: each for each in sorted(written.iterdir())}
    else:
        files = {(final or written).name: written}
    text = "".join(f"{sha256(path)}  {name}\n" for name, path in files.items())
    replace_flushed(_sums_of(final or written), text.encode())


def check_sums(target: Path) -> bool:
    """True if there are checksums for a file or folder, which all fit; False if there are none.

    Raises:
        CheckpointError: A file does not fit its checksum or is missing, or the checksums are no such text.
    """
    sums = _sums_of(target)
    if not sums.exists():
        return False
    with translated(f"{sums} cannot be read", CheckpointError), open(regular(sums), "rb") as file:
        lines = read_limited(file, _LIMIT_BYTES).decode().splitlines()
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None or not (is_safe(found[2]) or found[2] == target.name):
            raise CheckpointError(
                f"{sums} has the line {shown(line)}, which is no checksum of a file beside it"
            )
        path = sums.parent / found[2]
        with translated(f"{path} cannot be read", CheckpointError):
            fits = sha256(regular(path)) == found[1]
        if not fits:
            raise CheckpointError(
                f"{path} does not fit its checksum in {sums}: it is damaged, or of another save. If you have replaced "
                f"it yourself, remove {sums.name}"
            )
    return True


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(4 << 20):
            found.update(part)
    return found.hexdigest()


def _sums_of(target: Path) -> Path:
    return target / SUMS if target.is_dir() else target.with_name(f"{target.name}.sha256")
