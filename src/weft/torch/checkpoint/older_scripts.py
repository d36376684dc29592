"""Resuming from folders of ``.pt`` files, one for each rank, as older scripts wrote them.

    model_<rank>.pt          a pipeline rank's part of the model
    optimizer_<rank>.pt      a part of the optimizer's state
    fp16_states_<rank>.pt    32-bit copies of 16-bit weights, and the loss scale
    user_content.pt

How ``fp16_states_<rank>.pt`` is laid out inside was never documented, so its content is found by its form:

    {name: tensor}  or  {number: tensor}     copies by the parameter's name, or by its number among the optimizer's
    [[tensor, ...], ...]                     copies by group, of the parameters that this rank's model file has
    "loss_scale", "cur_scale"                the loss scale; also inside of a dict "loss_scaler"

Anything else is refused: without the copies a resumed run would quietly go on from rounded weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint.agree import gather_faults
from weft.checkpoint.find import is_ours, newest_tag
from weft.checkpoint.names import folder_name
from weft.errors import CheckpointError, UsageError
from weft.torch.checkpoint import named_state
from weft.torch.checkpoint.formats.source import InMemory, find_state
from weft.torch.checkpoint.formats.torch_file import load_file
from weft.torch.checkpoint.landing import Put, fill, land
from weft.torch.checkpoint.restore import Wanted, without_optimizers
from weft.torch.optimizer import MASTERS, SCALE, DistributedOptimizer
from weft.torch.session.collectives import AllRanks
from weft.torch.session.session import Session
from weft.torch.tensors.state_names import fitting
from weft.untrusted import shown, translated

_SCALES = ("loss_scale", "cur_scale")


def find_folder(root: Path, tag: str | None) -> Path | None:
    """The folder of ``.pt`` files that a tag, or ``newest``, names; None if there is none."""
    tag = tag if tag is not None else newest_tag(root)
    folder = root / folder_name(tag) if tag is not None else root
    if folder.is_symlink() and tag is not None:
        return None  # a save is no link, see ``checkpoint.find``
    return folder if folder.is_dir() and any(folder.glob("model_*.pt")) and not is_ours(folder) else None


def resume(session: Session, folder: Path, wanted: Wanted) -> Any:
    """The user's content; the model and the optimizer take what is theirs, split into any number of partitions."""
    source, optimizer, user, problem, wrong = None, None, None, [], []
    try:
        with translated(f"{folder} holds what older scripts did not write", CheckpointError, "do not use it"):
            source = OldPartial(folder, wanted.allow_pickle is True, named_state.state_names(wanted.model))
            optimizer = _read_optimizer(source, wanted) if wanted.optimizers else None
            if optimizer is None:
                wanted = without_optimizers(session, wanted, folder)
            user = source.user_content()
            if optimizer is not None and len(wanted.optimizers) > 1:
                wrong = [f"one optimizer was saved, the script has {len(wanted.optimizers)}"]
            elif optimizer is not None:
                wrong = _check_groups(wanted.optimizers[0], optimizer)
    except CheckpointError as error:
        problem = [str(error)]
    problem = gather_faults(AllRanks(session), problem)
    if problem:
        raise CheckpointError("; ".join(problem))
    assert source is not None
    if wanted.model is not None:
        wrong += named_state.check_model(wanted.model, source.shapes, wanted.strict)
    wrong = gather_faults(AllRanks(session), wrong)
    if wrong:
        raise UsageError(f"{folder} does not fit this script: {'; '.join(wrong)}")
    if wanted.model is not None:
        whole = source
        land(
            wanted.model,
            lambda: fill(session, wanted.model, whole.shapes, whole),
            {target: partial(_read_states, target, optimizer) for target in wanted.optimizers if optimizer},
        )
    return user


def _read_optimizer(source: OldPartial, wanted: Wanted) -> dict[str, Any] | None:
    """The optimizer's whole state, with the 32-bit copies of 16-bit weights and the loss scale if there are any."""
    content = source.optimizer()
    if content is None:
        return None
    states = source.fp16_states()
    groups = named_state.parameter_names(wanted.model, wanted.optimizers[0]) if states else []
    for rank, state in states.items():
        where = str(source.folder / f"fp16_states_{rank}.pt")
        copies, scale = read_fp16_state(state, groups, source.held.get(rank, set()), where)
        content[MASTERS] |= copies
        if scale:
            content[SCALE] = scale
    return content


def _check_groups(optimizer: Any, saved: Mapping[str, Any]) -> list[str]:
    """Where the groups of a saved optimizer differ from the script's; `ValueError` for a state that is none."""
    mine = [len(group["params"]) for group in named_state.torch_optimizer_of(optimizer).param_groups]
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


def _read_states(optimizer: Any, content: Mapping[str, Any]) -> Put:
    """Try what the optimizer is to keep, of which each rank takes its part; what puts it there."""
    mine = optimizer.mine() if isinstance(optimizer, DistributedOptimizer) else None
    state = {n: entry for n, entry in content["state"].items() if mine is None or mine[n]}
    named_state.try_state(optimizer, {**content, "state": state})
    return lambda: optimizer.load_state_dict(content)


class OldPartial(InMemory):
    """The files of a folder as one state.

    Args:
        folder: Where they lie, named by ranks as in any version.
        allow_pickle: Whether objects whose loading runs code may be read.
        wanted: The names that the model has for its tensors.

    Attributes:
        held: For each rank the names in its model file.
    """

    def __init__(self, folder: Path, allow_pickle: bool = False, wanted: Collection[str] = ()) -> None:
        self.folder = folder
        self.allow_pickle = allow_pickle
        self.held: dict[str, set[str]] = {}
        merged: dict[str, Any] = {}
        for path in sorted(folder.glob("model_*.pt")):
            part = find_state(load_file(path, allow_pickle), path)
            part = {name: part[given] for given, name in fitting(part, wanted).items()}
            self.held[path.stem.removeprefix("model_")] = set(part)
            merged |= part
        super().__init__(merged)

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's whole state, by the numbers of its parameters in the groups' order; None without one."""
        merged: dict[str, Any] | None = None
        for path in sorted(self.folder.glob("optimizer_*.pt")):
            content = load_file(path, self.allow_pickle)
            if not isinstance(content, Mapping) or "param_groups" not in content or "state" not in content:
                raise CheckpointError(f"{path} holds no optimizer's state with param_groups and state")
            if merged is None:
                merged = {"param_groups": content["param_groups"], "state": {}, MASTERS: {}}
            merged["state"] |= content["state"]
            merged[MASTERS] |= content.get(MASTERS, {})
            if SCALE in content:
                merged[SCALE] = content[SCALE]
        return merged

    def fp16_states(self) -> dict[str, Any]:
        """The contents of the files with 32-bit copies, by the rank in the file's name."""
        paths = sorted(self.folder.glob("fp16_states_*.pt"))
        return {path.stem.removeprefix("fp16_states_"): load_file(path, self.allow_pickle) for path in paths}

    def user_content(self) -> Any:
        """The user content that the script had saved besides; None without such a file."""
        path = self.folder / "user_content.pt"
        return load_file(path, self.allow_pickle) if path.exists() else None


def read_fp16_state(
    content: Any, groups: Sequence[Sequence[str]], held: Set[str], where: str
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """The copies by their parameter's number, and the state of the loss scale.

    Args:
        content: What the file holds.
        groups: The names of the optimizer's parameters, by group.
        held: The names in the model file of the same rank.
        where: The file, for messages.

    Raises:
        CheckpointError: No copies are found, or their number is not that of the parameters.

    >>> import torch
    >>> read_fp16_state({"masters": [[torch.ones(2)]], "loss_scale": 8.0}, [["a", "b"]], {"b"}, "x.pt")
    ({1: tensor([1., 1.])}, {'loss_scale': 8.0})
    """
    if not isinstance(content, Mapping):
        content = {"masters": content}
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    for value in (content, *content.values()):
        found = _by_key(value, numbers)
        if found is None:
            found = _by_group(value, groups, held, numbers, where)
        if found is not None:
            return found, _read_scale(content)
    kinds = ", ".join(f"{key}: {type(value).__name__}" for key, value in content.items())
    raise CheckpointError(
        f"{where} has no 32-bit copies that weft can read ({kinds}): expected tensors by parameter name or number, or "
        "lists of them by group. Remove the file to go on from the 16-bit weights"
    )


def _by_key(value: Any, numbers: Mapping[str, int]) -> dict[int, Tensor] | None:
    """Copies that are keyed by the name or the number of their parameter; None for another form."""
    if not isinstance(value, Mapping) or not value:
        return None
    known: dict[Any, int] = {number: number for number in numbers.values()}
    known.update(numbers)
    means = fitting((key for key in value if isinstance(key, str)), numbers)
    found = {means.get(key, key): tensor for key, tensor in value.items()}
    if all(key in known and isinstance(tensor, Tensor) for key, tensor in found.items()):
        return {known[key]: tensor for key, tensor in found.items()}
    return None


def _by_group(
    value: Any, groups: Sequence[Sequence[str]], held: Set[str], numbers: Mapping[str, int], where: str
) -> dict[int, Tensor] | None:
    """Copies in a list for each group of the optimizer; None for another form."""
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], (list, tuple)):
        return None
    if not all(isinstance(tensor, Tensor) for group in value for tensor in group):
        return None
    here = [[name for name in group if name in held] for group in groups]
    counts, expected = [len(group) for group in value], [len(group) for group in here]
    if counts != expected:
        raise CheckpointError(
            f"{where} has groups of {counts} copies, but the model file of its rank has {expected} parameters of the "
            "optimizer's groups: build the optimizer as the script that saved it did"
        )
    return {
        numbers[name]: tensor
        for names, tensors in zip(here, value, strict=True)
        for name, tensor in zip(names, tensors, strict=True)
    }


def _read_scale(content: Mapping[Any, Any]) -> dict[str, Any]:
    """The state of the loss scale; empty if there is none."""
    inner = content.get("loss_scaler")
    if isinstance(inner, Mapping):
        scale = next((inner[name] for name in _SCALES if name in inner), None)
        return {**inner, **({} if scale is None else {"loss_scale": float(scale)})}
    scale = next((content[name] for name in _SCALES if name in content), inner)
    return {"loss_scale": float(scale)} if isinstance(scale, (int, float, Tensor)) else {}
