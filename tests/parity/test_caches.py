"""Models that put keys and values into a cache train in parts as those that do not; see `caches.py`."""

from __future__ import annotations

import json

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .caches import CHECKS
from .jobs import FOLDER, PATHS, pass_checks

END = ["keys_that_were_not_sent_are_refused", "a_part_that_another_layer_writes_later_is_refused"]
"""After each of these a job cannot go on."""
ALL = [name for name in CHECKS if name not in END]
CUT = [name for name in ALL if not name.startswith(("lists", "things"))]
"""Those of models in which something can be cut."""
LAYOUTS = [  # ranks, settings, checks
    (4, {"tensor_parallel_degree": 2}, CUT),
    (
        4,
        {"context_parallel_degree": 2},
        [name for name in CUT if "T5" not in name and "token" not in name],
    ),  # its sequences stay whole
    (2, {}, [name for name in ALL if "models" not in name and "a_model" not in name]),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[tuple[int, dict[str, int], list[str]]]) -> None:
    for ranks, settings, checks in layouts:
        pass_checks("caches.py", checks, ranks, "--partitions", "2", env={"WEFT_SET": json.dumps(settings)})


@pytest.mark.parametrize(
    "name, words",
    [
        (
            END[0],
            [
                "that layers.0 has put into a list, dict or object",
                "lies on partition 0",
                "let that microbatch use it, too",
            ],
        ),
        (END[1], ["layers.3 writes into a Part into which another module has put tensors"]),
    ],
)
def test_what_would_differ_is_refused(name: str, words: list[str]) -> None:
    done = run_ranks(2, FOLDER / "caches.py", ["--partitions", "2", name], env=PATHS, warm=True)
    output = done.stdout + done.stderr
    assert done.returncode and all(each in output for each in words), output
