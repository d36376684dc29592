"""Resuming from folders of ``.pt`` files, one for each rank, as older scripts wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.find import is_ours, newest_tag
from weft.checkpoint.names import folder_name
from weft.errors import CheckpointError, UsageError
from weft.foreign import shown, translated
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.formats.fp16_states import read_fp16_state
from weft.torch.checkpoint.formats.source import OldPartial
from weft.torch.checkpoint.restore import Wanted, agree, land_with
from weft.torch.optimizer import MASTERS, SCALE, DistributedOptimizer
from weft.torch.session.session import Session


def folder_of(root: Path, tag: str | None) -> Path | None:
    """The folder of such files that a tag, or ``newest``, names; None if there is none."""
    tag = tag if tag is not None else newest_tag(root)
    folder = root / folder_name(tag) if tag is not None else root
    if folder.is_symlink() and tag is not None:
        return None  # a save is no link, see ``checkpoint.find``
    return folder if folder.is_dir() and any(folder.glob("model_*.pt")) and not is_ours(folder) else None


def resume(session: Session, folder: Path, wanted: Wanted) -> Any:
    """Load the model, the optimizer and the user's content; any number of partitions."""
    source, optimizer, user, problem, wrong = None, None, None, [], []
    try:
        with translated(f"{folder} holds what older scripts did not write", CheckpointError, "do not use it"):
            source = OldPartial(folder, wanted.allow_pickle is True, named_state.state_names(wanted.model))
            optimizer = _optimizer(source, wanted) if wanted.optimizer is not None else None
            user = source.user_content()
            if optimizer is not None:
                wrong = _check_groups(wanted.optimizer, optimizer)
    except CheckpointError as error:
        problem = [str(error)]
    problem = agree(session, problem)
    if problem:
        raise CheckpointError("; ".join(problem))
    assert source is not None
    if wanted.model is not None:
        wrong += named_state.check_model(wanted.model, source.shapes, wanted.strict)
    wrong = agree(session, wrong)
    if wrong:
        raise UsageError(f"{folder} does not fit this script: {'; '.join(wrong)}")
    if wanted.model is not None:
        land_with(wanted.model, lambda: _land(session, wanted, source, optimizer))
    return user


def _optimizer(source: OldPartial, wanted: Wanted) -> dict[str, Any] | None:
    """The optimizer's whole state, with the 32-bit copies of 16-bit weights and the loss scale if there are any."""
    content = source.optimizer()
    if content is None:
        return None
    states = source.fp16_states()
    groups = named_state.parameter_names(wanted.model, wanted.optimizer) if states else []
    for rank, state in states.items():
        where = str(source.folder / f"fp16_states_{rank}.pt")
        copies, scale = read_fp16_state(state, groups, source.held.get(rank, set()), where)
        content[MASTERS] |= copies
        if scale:
            content[SCALE] = scale
    return content


def _check_groups(optimizer: Any, saved: Mapping[str, Any]) -> list[str]:
    mine = [len(group["params"]) for group in named_state.inner(optimizer).param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    count = sum(mine)
    for number, entry in saved["state"].items():
        if type(number) is not int or not 0 <= number < count or not isinstance(entry, Mapping):
            raise ValueError(f"the optimizer's state has an entry {shown(number)}, of {count} parameters")
    return (
        []
        if mine == theirs
        else [f"the optimizer's groups had {theirs} parameters, the script's have {mine}"]
    )


def _land(session: Session, wanted: Wanted, source: OldPartial, optimizer: Mapping[str, Any] | None) -> None:
    if optimizer is not None:
        taking = wanted.optimizer
        mine = taking.mine() if isinstance(taking, DistributedOptimizer) else None
        state = {n: entry for n, entry in optimizer["state"].items() if mine is None or mine[n]}
        named_state.try_state(taking, {**optimizer, "state": state})
    named_state.load_model(session, wanted.model, source.shapes, source)
    if optimizer is not None:
        wanted.optimizer.load_state_dict(optimizer)
