"""Names in a state that a wrapper has changed.

``DataParallel``, and weft itself, put ``module.`` before them; ``torch.compile`` puts ``_orig_mod.`` into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

WRAPPER, COMPILED = "module.", "_orig_mod."


def fitting(given: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Which of the ``wanted`` names each of the ``given`` means; itself if it means none.

    A name that is there as it is means that, so a model may have a child called ``module``. Else wrappers' parts of
    names do not count, on either side.

    >>> fitting(["module.a.weight", "b", "c"], ["a._orig_mod.weight", "b", "d"])
    {'module.a.weight': 'a._orig_mod.weight', 'b': 'b', 'c': 'c'}
    """
    names = list(given)
    exact = {name for name in names if name in wanted}
    bare = {_bare(name): name for name in wanted if name not in exact}
    found: dict[str, str] = {}
    for name in names:
        found[name] = name if name in exact else bare.pop(_bare(name), name)
    return found


def _bare(name: str) -> str:
    name = name.replace(COMPILED, "")
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    return name
