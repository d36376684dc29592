"""The weights of a placed model that are cut over the ranks of axis `tp`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from weft.session.recording import record
from weft.torch.placed.plan import Plan, is_below
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits, split


def cut_weights(root: nn.Module, plan: Plan, owners: Mapping[str, int], session: Session) -> None:
    """Keep only this rank's part of the weights that the plan cuts; a model that is cut stays as it is.

    Collective over the ranks that split tensors. ``owners``: the partition of each parameter, by name. Parameters
    without memory are marked, and become parts when they are made.
    """
    if plan.tensors is None:
        return
    splits = Splits.from_record(plan.tensors)
    parameters = root.named_parameters(remove_duplicate=False)
    own = session.position("pp")
    here = {name for name, _ in parameters if owners.get(name, own) == own}
    mine = tuple(region for region in splits.regions if any(is_below(name, region.name) for name in here))
    splits = replace(splits, regions=mine)
    team = split(root, splits, session.tensor_group, session.position("tp"), session.mesh.tp, session.device)
    if team is not None:
        team.record = partial(record, session, "tensor")
