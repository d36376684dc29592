"""Every public name of smdistributed is there and takes what scripts give it, or one sentence says why not."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from tests.long import one_day_in
from tests.unit.compat.test_names import python

LIST = Path(__file__).parents[2] / "data" / "smdistributed_names.txt"
ENTRY = re.compile(r"([\w.]+)(?:\(([\w, ]*)\))?(?: ! (.+))?")

SCAN = """
import importlib, inspect, json, sys, torch
import weft.compat; weft.compat.enable()
import smdistributed.modelparallel.torch as smp
smp.init()
model = smp.DistributedModel(torch.nn.Linear(2, 1))
instances = {
    smp.DistributedModel: model, smp.StepOutput: smp.step(lambda x: x)(torch.ones(2, 1)),
    smp.DistributedOptimizer: smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
}

def looked_up(dotted):
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part) and value in instances:
                value = instances[value]
            value = getattr(value, part)
        return value

def told(dotted, keywords, call):
    try:
        value = looked_up(dotted)
        if call:
            value(**dict.fromkeys(keywords))
        elif keywords:
            taken = inspect.signature(value).parameters
            if not any(taken[name].kind is inspect.Parameter.VAR_KEYWORD for name in taken):
                return [f"does not take {name}" for name in keywords if name not in taken]
        return []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]

print(json.dumps([told(*entry) for entry in json.loads(sys.stdin.read())]))
"""


def entries() -> list[tuple[str, list[str], str]]:
    found = []
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            match = ENTRY.fullmatch(line)
            assert match, line
            if ".tensorflow" in match[1] and importlib.util.find_spec("tensorflow") is None:
                continue
            found.append((match[1], re.findall(r"\w+", match[2] or ""), match[3] or ""))
    return found


@one_day_in(2)
def test_every_name_works_or_is_refused_in_one_sentence():
    import json
    import os
    import subprocess

    from tests.launching import SOURCE

    wanted = entries()
    assert len(wanted) > 150
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SM_", "WEFT_"))}
    asked = [(name, keywords, bool(words)) for name, keywords, words in wanted]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCAN],
        input=json.dumps(asked),
        env={**environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    wrong = []
    for (name, _, words), said in zip(wanted, json.loads(done.stdout.splitlines()[-1]), strict=True):
        refused = words and len(said) == 1 and words in said[0] and ": " in said[0].partition(": ")[2]
        if not refused if words else said:
            wrong.append((name, said))
    assert not wrong


def test_what_nobody_knows_is_told_where_to_look():
    code = """
import weft.compat; weft.compat.enable()
import smdistributed.modelparallel.torch as smp
try:
    smp.no_such_name
except AttributeError as error:
    assert "docs/migration.md" in str(error), error
    print("unknown")
"""
    assert python(code) == ["unknown"]


MPI = """
class World:
    @staticmethod
    def Get_size():
        return {size}
COMM_WORLD = World()
"""


def test_mpi_that_knows_nothing_of_the_ranks_is_refused(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    code = """
import weft.compat; weft.compat.enable()
try:
    from mpi4py import MPI
    print(MPI.COMM_WORLD.Get_size())
except Exception as error:
    assert "weft run --engine mpirun" in str(error), error
    print(type(error).__name__)
"""
    from tests.launching import SOURCE

    path = {"PYTHONPATH": f"{SOURCE}:{tmp_path}", "WORLD_SIZE": "2", "RANK": "0"}
    for size, shared, found in ((1, True, "LaunchError"), (2, True, "2"), (1, False, "1")):
        (package / "MPI.py").write_text(MPI.format(size=size))
        assert python(code, "-B", **path, **({"WEFT_SHARED_FD": "9"} if shared else {})) == [found]
