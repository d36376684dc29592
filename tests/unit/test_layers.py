"""A layer uses what stands above it, never what stands below; and the core stays pure."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent

CORE = (
    ("errors",),
    ("untrusted",),
    ("units",),
    ("terminal_text",),
    ("import_hooks",),
    ("document",),
    ("checks",),
    ("schedule",),
    ("config",),
    ("timeline",),
    ("graph",),
    ("topology",),
    ("machines",),
    ("simulate",),
    ("partition",),
    ("plan",),
    ("analysis",),
    ("rules",),
    ("report",),
    ("check",),
)
EFFECTS = (
    ("transport",), ("reduce",), ("watch",), ("runtime",), ("measure",), ("profiler",), ("launch",), ("tune",),
    ("session",), ("communication",), ("checkpoint",),
)  # fmt: skip
FRONTENDS = (("torch", "tensorflow"), ("compat",), ("integrations",), ("cli",), ("__main__",))

ROOMS = {
    "torch": (
        ("pytorch",), ("tensors",), ("calls", "offload", "output"), ("backward", "session"), ("execution",),
        ("agreement", "amp", "delayed_parameters", "gathering", "keras_layers", "tensor_parallel", "watching"),
        ("context_parallel", "pretrained", "replicas"),
        ("clip", "data_parallel", "optimizer_steps"), ("optimizer",), ("interceptions",),
        ("activation_checkpointing", "placed", "trace", "wrappable"), ("model", "verify"),
        ("checkpoint", "split", "step_run"), ("rehearse",), ("join",), ("example_graph", "step"), ("graph_file",),
        ("example_check",),
    ),
    "tensorflow": (
        ("private",), ("mini_batch", "output", "session", "trace"),
        ("checkpoint", "clip", "delayed_parameters", "replicas", "split", "watching"),
        ("example_graph", "execution", "optimizers", "report"), ("verify",), ("join", "step"),
        ("data_parallel", "training"),
        ("model",),
    ),
}  # fmt: skip
"""The rooms and files of each frontend, from the ground: each may use what stands before it."""
MAY_USE = {
    "torch": {
        "pytorch": {"errors", "transport"},
        "tensors": {"communication", "errors", "untrusted", "session", "transport"},
        "calls": {"errors"},
        "gathering": {"errors"},
        "offload": {"errors", "runtime", "units"},
        "session": {
            "checkpoint", "config", "errors", "launch", "reduce", "runtime", "session", "topology", "transport",
        },
        "agreement": {"errors", "launch", "session"},
        "backward": {"errors"},
        "tensor_parallel": {"errors", "import_hooks", "reduce", "topology"},
        "context_parallel": {"errors"},
        "replicas": {"errors", "import_hooks", "reduce", "runtime", "session", "transport"},
        "execution": {"communication", "errors", "runtime", "session", "transport"},
        "trace": {"errors", "graph", "runtime"},
        "placed": {"errors", "untrusted", "graph", "partition", "report", "session"},
        "verify": {"errors", "runtime", "schedule", "session", "transport", "units"},
        "split": {
            "analysis", "config", "errors", "untrusted", "graph", "partition", "plan", "report", "runtime", "schedule",
            "session", "simulate", "timeline", "topology", "transport", "units",
        },
        "rehearse": {
            "config", "errors", "graph", "launch", "machines", "plan", "schedule", "session", "simulate", "topology",
            "transport", "units", "watch",
        },
        "checkpoint": {"checkpoint", "communication", "document", "errors", "untrusted", "session"},
    },
    "tensorflow": {
        "private": set(),
        "mini_batch": {"errors", "session"},
        "session": {"communication", "errors", "session", "transport"},
        "trace": {"errors"},
        "checkpoint": {"checkpoint", "errors", "untrusted", "session"},
        "replicas": {"errors", "reduce", "session", "transport"},
        "split": {
            "config", "errors", "graph", "partition", "plan", "schedule", "session", "simulate", "topology",
            "untrusted",
        },
        "execution": {
            "analysis", "config", "errors", "partition", "plan", "report", "runtime", "schedule", "session",
            "transport", "watch",
        },
        "data_parallel": {"errors", "session"},
        "verify": {"errors", "runtime", "session", "transport"},
    },
}  # fmt: skip
"""What each room of a frontend may use of the rest of weft."""
MOST_FILES = 20
FORMER = {"weft.partition.auto", "weft.partition.explain", "weft.partition.stages"}
"""Former names of modules, which scripts may import; they stand above what they name."""

LEVEL = {name: level for level, names in enumerate(CORE + EFFECTS + FRONTENDS) for name in names}
PURE = {name for names in CORE for name in names}
IMPURE = {"torch", "tensorflow", "numpy", "os", "socket", "time", "subprocess", "threading"}

FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, wherever in the file."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *base.split(".")] if base else parents)
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else base for member in members}
    return found


def layer_of(module: str) -> str:
    """`weft.graph.model` is of the layer `graph`, `weft` of none."""
    return module.split(".")[1] if "." in module else ""


def test_every_package_is_in_the_list():
    assert {layer_of(module) for module in MODULES} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_upwards(module):
    here = layer_of(module)
    for imported in imports(MODULES[module]):
        if imported.split(".")[0] != "weft" or not layer_of(imported) or layer_of(imported) == here:
            continue
        there = layer_of(imported)
        if module in FORMER:
            continue
        assert here and LEVEL[there] < LEVEL[here], f"{module} may not use {imported}: {there} stands below"


def room_of(module: str) -> tuple[str, str]:
    """`weft.torch.session.device` is of the frontend `torch` and its room `session`; empty for all else."""
    parts = module.split(".")
    return (parts[1], parts[2]) if len(parts) > 2 and parts[1] in ROOMS else ("", "")


HEIGHT = {
    (frontend, name): level
    for frontend, rooms in ROOMS.items()
    for level, names in enumerate(rooms)
    for name in names
}


@pytest.mark.parametrize("module", [name for name in MODULES if any(room_of(name))])
def test_rooms_use_what_stands_before_them(module):
    here = frontend, room = room_of(module)
    allowed = MAY_USE[frontend].get(room)
    for imported in imports(MODULES[module]):
        there = room_of(imported)
        if there == here:
            continue
        if any(there):
            assert there[0] == frontend, f"{module} may not use {imported}: it is of another frontend"
            assert HEIGHT[there] < HEIGHT[here], (
                f"{module} may not use {imported}: {there[1]} stands after {room}"
            )
        elif layer_of(imported) and allowed is not None and imported.startswith("weft."):
            assert layer_of(imported) in allowed, f"{module} may not use {imported}"


def test_folders_are_small():
    sizes = {folder: len([*folder.glob("*.py")]) for folder in {path.parent for path in FILES}}
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_no_file_uses_itself_in_a_circle():
    arrows = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    done: set[str] = set()
    while ready := {name for name, used in arrows.items() if name not in done and used <= done}:
        done |= ready
    assert arrows.keys() - done == set(), "these files use each other in circles, or use such files"


@pytest.mark.parametrize("module", [name for name in MODULES if layer_of(name) in PURE | {""}])
def test_the_core_is_pure(module):
    used = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not used & IMPURE, f"{module} is of the pure core and may not use {sorted(used & IMPURE)}"


def test_the_core_can_be_imported_without_a_framework():
    core = [name for name in MODULES if layer_of(name) in PURE | {""}]
    hide = "import sys; sys.modules.update(torch=None, tensorflow=None, numpy=None)"
    code = "\n".join([hide, *(f"import {name}" for name in core)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


FOR_ANY_FRAMEWORK = ("checkpoint", "plan", "runtime", "schedule", "session", "watch")
"""Layers that every frontend uses."""


def test_what_every_frontend_uses_needs_no_framework():
    shared = [name for name in MODULES if layer_of(name) in FOR_ANY_FRAMEWORK]
    assert {layer_of(name) for name in shared} == {*FOR_ANY_FRAMEWORK}
    hide = "import sys; sys.modules.update(torch=None, tensorflow=None)"
    code = "\n".join([hide, *(f"import {name}" for name in shared)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_relative_imports_are_resolved(tmp_path, monkeypatch):
    """The checks above see through `from . import x` too."""
    package = tmp_path / "weft" / "graph"
    package.mkdir(parents=True)
    path = package / "model.py"
    path.write_text("from ..torch import nothing\nfrom .units import a\nfrom . import b\nimport os.path\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "weft")
    assert imports(path) == {"weft.torch", "weft.graph.units", "weft.graph", "os.path"}


BELOW = {"tape": 22, "unit_call": 41, "program": 34, "glue": 38, "step_results": 36}
"""The files that one file of `torch.execution` stands on, at most; these numbers may only fall."""
CHAIN = 45
"""The longest chain of files each of which imports the next one."""


@pytest.mark.parametrize("name", BELOW)
def test_the_execution_of_a_step_stands_on_little(name):
    """Sharding, optimizers, clipping and replicas plug in; whoever reads the core need not know them."""
    below: set[str] = set()
    todo = {f"weft.torch.execution.{name}"}
    while todo:
        todo = set().union(*(imports(MODULES[each]) & MODULES.keys() for each in todo)) - below
        below |= todo
    assert (
        len({each for each in below if MODULES[each].name != "__init__.py" or imports(MODULES[each])})
        <= BELOW[name]
    )
    rooms = {room_of(each)[1] for each in below} - {""}
    assert not rooms & {
        "tensor_parallel",
        "context_parallel",
        "replicas",
        "optimizer",
        "clip",
        "data_parallel",
    }


def test_chains_of_imports_are_short():
    arrows = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}

    @functools.cache
    def length(name: str) -> int:
        return 1 + max(map(length, arrows[name]), default=0)

    assert max(map(length, sorted(arrows))) <= CHAIN


def test_no_import_is_hidden_in_a_text():
    """`importlib.import_module("weft...")` would go around the tests above."""
    hidden = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and node.args
        and isinstance(node.args[0], (ast.Constant, ast.JoinedStr))
        and "weft" in ast.unparse(node.args[0])
    }
    assert hidden == set()


def test_only_recordings_ask_what_time_it_is() -> None:
    """A clock that somebody sets must not end or prolong a wait."""
    asked = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "datetime.now", "datetime.datetime.now")
    }
    doctor = {"weft.launch.doctor.facts", "weft.launch.doctor.remote"}  # how far clocks of hosts are apart
    told = {
        "weft.watch.files.blocked_ranks",
        "weft.watch.statement",
        "weft.watch.progress",
    }  # in files that others read
    assert asked <= {"weft.profiler.clock", *told, *doctor}
