"""Full checkpoints: the whole model in one file that plain PyTorch reads, with a manifest beside it.

    <path>/<tag>                  torch.save of the state, names as in the wrapped module
    <path>/user_content_<tag>     torch.save of the user's content
    <path>/manifest_<tag>.json    sizes and checksums that the two may have
    <path>/newest                 the tag

A tag that is saved again has, for a moment, a manifest that allows the old files and the new ones.
"""

from __future__ import annotations

import io
import json
import logging
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.agree import ask_first, gather_faults
from weft.checkpoint.find import newest_tag
from weft.checkpoint.folder import (
    Lock,
    explain,
    flush_file,
    flush_folder,
    name_newest,
    remove_leftovers,
    replace_flushed,
    temporary_beside,
)
from weft.checkpoint.names import check_tag, read_text
from weft.checkpoint.save import Request, SaveReport, Saves, meet
from weft.document import Document
from weft.errors import CheckpointError, FormatError, UsageError
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.formats.source import InMemory, Renamed, Source, open_source
from weft.torch.checkpoint.formats.sums import check_sums
from weft.torch.checkpoint.formats.torch_file import load_file, read_torch_file
from weft.torch.checkpoint.landing import fill, land
from weft.torch.checkpoint.restore import Wanted
from weft.torch.model import DistributedModel
from weft.torch.session.collectives import AllRanks
from weft.torch.session.session import Session
from weft.torch.tensors import saved_values
from weft.untrusted import LARGEST, parse_json, regular, translated

log = logging.getLogger("weft")
_MANIFEST_LIMIT_BYTES = 1 << 20
_WRAPPED = "weft_content"


def manifest_name(tag: str) -> str:
    return f"manifest_{tag}.json"


def save(
    session: Session, request: Request, model: DistributedModel | None, user_content: Any, allow_pickle: bool
) -> SaveReport | None:
    """Gather the model on the first rank, which writes the files.

    Collective over the first pipeline, or over all ranks if replicas share parameters.
    """
    import time

    began = time.monotonic()
    if model is None:
        raise UsageError("a full checkpoint is a model: pass model=")
    saves = Saves.of(session)
    saves.finish()
    meeting = saves.meeting(request.what, request.everybody)
    came = meet(meeting, request.arguments("save_checkpoint(partial=False)"))
    if session.rank not in meeting.required:
        meeting.part(came)
        return None
    whole = model.state_dict(gather_to_rank0=True)
    if meeting.leads:
        ended: dict[str, Any] = {"bytes": 0}
        try:
            write(request, saves, dict(whole), user_content, allow_pickle)
        except Exception as error:  # others wait for the outcome
            ended = {"error": f"{request.tag} was not saved: {explain(error, request.root)}"}
        meeting.end(ended)
    else:
        ended = meeting.ended()
    meeting.part()
    if "error" in ended:
        raise CheckpointError(ended["error"])
    size = sum(value.numel() * value.element_size() for value in whole.values() if isinstance(value, Tensor))
    took_s = time.monotonic() - began
    return SaveReport(request.root / request.tag, size, took_s, took_s)


def write(
    request: Request, saves: Saves, whole: Mapping[str, Any], user_content: Any, allow_pickle: bool
) -> None:
    """Write, flush and rename the files of a full checkpoint; ``newest`` last."""
    root, tag = request.root, request.tag
    content = _user_bytes(user_content, allow_pickle)
    request.reached("mkdir")
    root.mkdir(parents=True, exist_ok=True)
    if root.resolve() not in saves.locks:
        saves.locks[root.resolve()] = Lock(root)
    if saves.locks[root.resolve()].exclusive:
        remove_leftovers(root)
    new = {final: temporary_beside(final) for final in (root / tag, root / f"user_content_{tag}")}
    try:
        request.reached("write")
        state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in whole.items()}
        for final, temporary in new.items():
            with open(temporary, "xb") as file:
                if final.name == tag:
                    torch.save(state, file)
                else:
                    file.write(content)
            request.reached("flush")
            flush_file(temporary)
        sums = {final.name: [checksum(temporary)] for final, temporary in new.items()}
        old, number = _read_manifest(root, tag), 1 + max((n for n, _ in full_tags(root)), default=0)
        before = {name: [*sums[name], *old.get("files", {}).get(name, [])] for name in sums}
        request.reached("rename")
        replace_flushed(root / manifest_name(tag), json.dumps({"number": number, "files": before}).encode())
        for final, temporary in new.items():
            os.replace(temporary, final)
        request.reached("parent")
        flush_folder(root)
        replace_flushed(root / manifest_name(tag), json.dumps({"number": number, "files": sums}).encode())
        request.reached("newest")
        name_newest(root, tag)
    finally:
        for temporary in new.values():
            temporary.unlink(missing_ok=True)


def _user_bytes(value: Any, allow_pickle: bool) -> bytes:
    """The bytes of the file with the user's content.

    Content that plain weights-only loading reads is saved as it is, other content as JSON and tensors.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(saved_values.encoder(tensors, "user", allow_pickle).encode(value, "user_content"))
    plain, wrapped = io.BytesIO(), io.BytesIO()
    with suppress(Exception):
        torch.save(value, plain)
        read_torch_file(io.BytesIO(plain.getvalue()), weights_only=True)
        return plain.getvalue()
    torch.save({_WRAPPED: text, "tensors": tensors}, wrapped)
    return wrapped.getvalue()


def checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    found = size = 0
    with open(path, "rb") as file:
        while part := file.read(4 << 20):
            found, size = zlib.crc32(part, found), size + len(part)
    return [size, found]


def _read_manifest(root: Path, tag: str) -> dict[str, Any]:
    with suppress(CheckpointError, FormatError):
        content = Document(parse_json(read_text(root, manifest_name(tag), _MANIFEST_LIMIT_BYTES)))
        content.only("number", "files")
        files = content["files"]
        known = {
            name: [[part.whole() for part in sums] for sums in files[name]]
            for name in (tag, f"user_content_{tag}")
            if name in files
        }
        if 0 <= content["number"].whole() < LARGEST:
            return {"number": content["number"].whole(), "files": known}
    return {}


def full_tags(root: Path) -> list[tuple[int, str]]:
    """Number and tag of the full checkpoints with a manifest, the newest first."""
    names = [path.name[len("manifest_") : -len(".json")] for path in root.glob("manifest_*.json")]
    found = []
    for name in names:
        found.append((_read_manifest(root, name).get("number", 0), name))
    return sorted(found, reverse=True)


def faults(root: Path, tag: str) -> list[str]:
    """Faults of a full checkpoint. Files without a manifest, as other programs write them, have none."""
    if not (root / tag).exists():
        return [f"{root / tag} is missing"]
    if not (root / manifest_name(tag)).exists():
        return []
    allowed = _read_manifest(root, tag).get("files")
    if not allowed:
        return [f"{root / manifest_name(tag)} is altered"]
    found = []
    for name in (tag, f"user_content_{tag}"):
        if not (root / name).exists():
            found.append(f"{root / name} is missing")
            continue
        try:
            with translated(f"{root / name} cannot be read", CheckpointError):
                whole = checksum(regular(root / name)) in allowed.get(name, [])
        except CheckpointError as error:
            found.append(str(error))
            continue
        if not whole:
            found.append(f"{root / name} is truncated or altered: it does not fit its checksum")
    return found


def resume(session: Session, path: Path, tag: str | None, wanted: Wanted, translate: Any) -> Any:
    """The user's content of a full checkpoint, whose model is loaded.

    The model is in ``path/tag``, or in ``path`` itself if that is a file or folder of another format.
    """
    target, chosen, summed = _choose(session, path, tag)
    source: Source | None = None
    user, problem = None, ""
    try:
        with translated(f"{target} cannot be read", CheckpointError):
            source = open_source(target, wanted.allow_pickle is True)
            if chosen is not None and (path / f"user_content_{chosen}").exists():
                user = _user_content(path / f"user_content_{chosen}", wanted.allow_pickle)
        if session.rank == 0 and not summed:
            _warn_of_doubts(target, source)
        if translate is not None:
            source = InMemory(translate({name: source.read(name) for name in source.shapes}))
    except CheckpointError as error:
        problem = str(error)
    problems = gather_faults(AllRanks(session), [problem] if problem else [])
    if problems:
        raise CheckpointError("; ".join(problems))
    assert source is not None
    whole = Renamed(source, named_state.state_names(wanted.model))
    if wanted.model is not None:
        wrong = gather_faults(
            AllRanks(session), named_state.check_model(wanted.model, whole.shapes, wanted.strict)
        )
        if wrong:
            raise UsageError(f"{target} does not fit this script: {'; '.join(wrong)}")
        land(wanted.model, lambda: fill(session, wanted.model, whole.shapes, whole), {})
    return user


def _warn_of_doubts(target: Path, source: Source) -> None:
    if not source.checksums:
        log.info("%s has no checksums: damage inside of its numbers would not be seen", target)
    if source.doubts:
        log.warning(
            "%s may hold files of two saves, as one that was killed leaves them when it writes over an older one: %s. "
            "The format does not mark which is which. A copy made without the files' times (use cp -p) looks the same",
            target, "; ".join(source.doubts),
        )  # fmt: skip


def _choose(session: Session, path: Path, tag: str | None) -> tuple[Path, str | None, bool]:
    """The file or folder to read, its tag, and whether its checksums were beside it and fit."""

    def choice() -> list[Any]:
        if tag is None and (not path.is_dir() or not (full_tags(path) or newest_tag(path))):
            return [str(path), None, check_sums(path)]
        newest = newest_tag(path)
        known = [name for _, name in full_tags(path)]
        tags = [tag] if tag is not None else list(dict.fromkeys([*([newest] if newest else []), *known]))
        bad: list[str] = []
        for name in tags:
            wrong = faults(path, check_tag(name))
            if not wrong:
                if bad:
                    log.warning(
                        "loading %s, because newer checkpoints are not whole: %s", name, "; ".join(bad)
                    )
                return [str(path / name), name, check_sums(path / name)]
            bad += wrong
        good = next((name for name in known if name not in tags and not faults(path, name)), None)
        offer = (
            f"The newest one that is whole is {good!r}: pass tag={good!r}"
            if good
            else "There is no other one"
        )
        raise CheckpointError(f"the checkpoint cannot be used: {'; '.join(bad)}. {offer}")

    target, chosen, summed = ask_first(AllRanks(session), choice)
    return Path(target), chosen, summed


def _user_content(path: Path, allow_pickle: bool | str) -> Any:
    content = load_file(path, allow_pickle is True)
    if isinstance(content, dict) and set(content) == {_WRAPPED, "tensors"}:
        tensors = content["tensors"]
        with translated(f"{path} cannot be read", CheckpointError):
            return saved_values.decoder(lambda name: tensors[name], allow_pickle).decode(
                parse_json(content[_WRAPPED])
            )
    return content
