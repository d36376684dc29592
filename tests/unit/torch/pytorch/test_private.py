"""PyTorch's private names: which versions have them, where they stand, and what weft does where one is missing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

import weft
from tests.long import long
from weft.torch.pytorch import private, private_dtensor
from weft.torch.tensor_parallel.shard_group import new_name
from weft.torch.verify.self_check import TESTED, release_of
from weft.transport import private_c10d
from weft.transport.private_c10d import NEEDED, Name

NAMES: dict[str, Name] = {**private_c10d.NAMES, **private.NAMES, **private_dtensor.NAMES}
LACKING: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
"""Names that some versions lack: the first version without it, and the first one that has it again."""

HIDE = """
import json, operator, os, sys
import weft.torch.verify.self_check

for name in [name for name in sys.modules if name.split(".")[0] == "weft"]:
    del sys.modules[name]  # what it imports of others stays

real = operator.attrgetter

def hidden(name):
    def getter(path):
        def fail(root):
            raise AttributeError(path)
        return fail if path in (name, name.removesuffix("_impl")) else real(path)
    return getter

def told(name):
    operator.attrgetter = hidden(name)
    import weft.torch
    from weft.torch.verify import self_check
    operator.attrgetter = real
    try:
        self_check.check(first=True)
    except weft.errors.ConfigError as error:
        return f"refused: {error}"
    return f"tried: {self_check.try_out()}"

for name in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            said = told(name)
        except BaseException as error:
            said = f"broke: {error!r}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        print(json.dumps([name, pipe.read()]))
    os.wait()
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What weft says in a process where one name is missing, by the name."""
    command = [sys.executable, "-W", "ignore", "-c", HIDE, json.dumps([*NAMES])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return dict(map(json.loads, run.stdout.splitlines()))


@pytest.mark.parametrize("path", NAMES)
def test_this_version_has_the_name(path: str):
    first, again = LACKING.get(path, ((0, 0), (0, 0)))
    lacks = first <= release_of(torch.__version__) < again
    assert NAMES[path].present is not lacks, (
        f"PyTorch {torch.__version__} {'has' if lacks else 'lacks'} {path}"
    )


@long
@pytest.mark.parametrize("path", NAMES)
def test_without_the_name_gradients_are_right_or_init_refuses(path: str, said: dict[str, str]):
    if NAMES[path].without is NEEDED:
        expected = f"refused: PyTorch {torch.__version__} has no {path} ({NAMES[path].purpose})"
        assert said[path].startswith(expected)
        assert "install one that was tested: pip install" in said[path]
    else:
        assert said[path] == "tried: {}"


def test_a_purpose_and_a_way_without_are_said():
    assert all(name.purpose and name.without for name in NAMES.values())


def test_the_version_of_development_is_tested():
    assert release_of(TESTED[0]) <= release_of(torch.__version__) <= release_of(TESTED[1])


# --- nowhere else -------------------------------------------------------------------------------------------

SOURCE = Path(weft.__file__).parent
HOLDERS = {
    "torch/pytorch/private.py", "torch/pytorch/private_dtensor.py", "transport/private_c10d.py",
    *(
        f"tensorflow/private/{name}.py"
        for name in (
            "callbacks", "functions", "gradients", "graphs", "models", "random_states", "recording", "variables",
            "weight_files",
        )
    ),
}  # fmt: skip
OTHERS = {
    "_asdict": "named tuples",
    "_current_exceptions": "sys",
    "_current_frames": "sys",
    "_exit": "os",
    "_getframe": "sys",
    "_torch_params": "Keras's, in torch/keras_layers.py",
    "_trainable_variables": "Keras's, in torch/keras_layers.py",
    "_fields": "named tuples",
    "_prepare_backend": "accelerate's, in compat/hf/ranks.py",
    "_replace": "named tuples",
    "_shared_state": "accelerate's, in integrations/accelerate.py",
}
"""Private by their look, but not PyTorch's."""


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that weft itself gives: functions, classes, variables, attributes."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def foreign(tree: ast.Module, own: set[str]) -> list[str]:
    """Private names of others that a file uses."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            name = next((part for part in parts if part.startswith("_")), "")
        else:
            continue
        private_name = name.startswith("_") and not name.startswith(("__", "_weft")) and name not in own
        if private_name and name not in OTHERS:
            found.append(f"line {node.lineno}: {name}")
    return found


def test_private_names_stand_in_few_files():
    files = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    own = own_names([*trees.values()])
    faults = {name: foreign(tree, own) for name, tree in trees.items() if name not in HOLDERS}
    assert {name: found for name, found in faults.items() if found} == {}
    assert all(foreign(trees[name], own) for name in HOLDERS)


def test_the_scan_sees_private_names():
    text = "from torch._C import x\nfrom torch.y import _z\ntensor._version\nself._own = 1\nself._own\ntorch.ones\n"
    tree = ast.parse(text)
    assert foreign(tree, own_names([tree])) == ["line 1: _C", "line 2: _z", "line 3: _version"]


@pytest.mark.parametrize("counts_itself", [False, True])
def test_a_backend_is_told_to_count_where_pytorch_does_not(monkeypatch, counts_itself):
    class Backend:
        told = 0

        def _set_sequence_number_for_group(self):
            self.told += 1

    monkeypatch.setattr(private_c10d, "_counts_itself", counts_itself)
    private_c10d.number_operations(backend := Backend())
    assert backend.told == (not counts_itself)


def test_what_pytorch_would_try_for_a_minute_is_refused_at_once():
    if private_dtensor._ways is None:
        pytest.skip(f"PyTorch {torch.__version__} tries nothing")
    private_dtensor.take_plain_as_replicated()
    with private.imagined_mesh(2, "cpu", new_name()) as mesh:
        query = DTensor.from_local(torch.ones(2, 6, 4, 4), mesh, [Shard(2)], run_check=False)
        key = torch.ones(2, 6, 8, 4)
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NotImplementedError) as told:
            F.scaled_dot_product_attention(query, key, key)
        assert "cut in 125 ways" in str(told.value.__cause__)
