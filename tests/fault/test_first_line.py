"""The first line of a failed job names the rank and what it did, from the first line of the script to its last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import Completed, run_ranks
from tests.long import one_in

WHO = r"weft: rank {} on \S+ \(pid \d+\) failed in "
BEFORE = "its start, before weft.init: "
INIT = "import os\nimport weft.torch as weft\nweft.init({'partitions': 2})\n"


def run(script: str | Path, n: int = 2, options: tuple[str, ...] = ()) -> Completed:
    done = run_ranks(n, script, warm=True, timeout=60, options=options)
    assert done.returncode == 1, done.stderr
    return done


def first_line(done: Completed) -> str:
    return done.stderr.splitlines()[0] if done.stderr else ""


EARLY = {
    "a missing module": (
        "import os\nif os.environ['RANK'] == '1':\n    import nowhere",
        "ModuleNotFoundError: No module named 'nowhere'",
    ),
    "an exception": (
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('early')",
        "ValueError: early",
    ),
    "an exception of SystemExit's kind": (
        "import os\nif os.environ['RANK'] == '1':\n    assert False, 'no'",
        "AssertionError: no",
    ),
}


@pytest.mark.parametrize("what", EARLY)
def test_an_error_before_init_is_told_with_its_rank(what: str):
    script, error = EARLY[what]
    done = run(f"{script}\nimport time\ntime.sleep(60)\n")
    assert re.match(WHO.format(1) + re.escape(BEFORE + error) + "$", first_line(done)), done.stderr
    assert "weft/launch" not in done.stderr and "runpy" not in done.stderr, "frames of weft's own"


def test_an_interrupt_that_an_import_swallows_ends_the_job(tmp_path: Path):
    (tmp_path / "careless.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept:\n    pass\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    import careless\nimport time\ntime.sleep(60)\n"
    )
    done = run_ranks(2, script, warm=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert re.match(r"weft: rank 1 on \S+ \(pid \d+\) .*130", first_line(done)), done.stderr


def test_a_script_that_cannot_be_read_is_told_once():
    done = run("def (\n")
    assert re.match(
        rf"weft: rank \d on \S+ \(pid \d+\) failed in {BEFORE}SyntaxError: invalid syntax", first_line(done)
    )
    assert done.stderr.count("SyntaxError: invalid syntax\n") == 1
    assert re.search(r"^rank \d failed with the same words$", done.stderr, re.M), done.stderr


def test_an_error_after_shutdown_is_told_with_its_rank():
    done = run(INIT + "weft.shutdown()\nif os.environ['RANK'] == '1':\n    raise ValueError('late')\n")
    assert re.match(WHO.format(1) + "its end, after weft.shutdown: ValueError: late$", first_line(done)), (
        done.stderr
    )


def test_what_all_ranks_say_is_said_once():
    done = run("import weft.torch as weft\nweft.init({'partitionz': 2})\n", 3)
    assert done.stderr.count('there is no setting "partitionz"') == 1, done.stderr
    assert re.search(r"^rank \d(, \d)? failed with the same words$", done.stderr, re.M), done.stderr


def test_the_scripts_own_line_stands_before_a_long_stack():
    script = INIT + (
        "import json\n"
        "def mine(n):\n    return json.dumps({1: [[[[[weft]]]]]}, indent=n)  # this line\n"
        "if weft.rank():\n    mine(1)\nweft.barrier()\n"
    )
    done = run(script)
    first, own = done.stderr.splitlines()[:2]
    assert re.match(r"weft: rank 1 on \S+ \(pid \d+\) failed: TypeError", first)
    assert re.match(r"at \S+script\.py, line 6, in mine: return json\.dumps", own), done.stderr


@pytest.mark.parametrize(
    ("line", "failed", "told"),
    [
        ("batch = 64 // (world_size // 8)", "ZeroDivisionError", "world_size // 8 is 0 in a job of 2 ranks"),
        (
            "DataLoader(range(9), 1 // world_size)",
            "ValueError",
            "1 // world_size gives 0 for what is below 2",
        ),
    ],
)
def test_a_division_that_assumes_more_ranks_is_told_with_its_line(line: str, failed: str, told: str):
    done = run(f"{INIT}from torch.utils.data import DataLoader\nworld_size = weft.size()\n{line}\n")
    first, *more = done.stderr.splitlines()
    assert failed in first
    assert re.match(rf"\S+script\.py, line 6: {re.escape(told)}", more[0]), done.stderr


def test_nothing_of_pytorch_comes_before_the_first_line():
    """PyTorch's store wrote warnings and stacks when another rank was gone; `TORCH_` variables show all there is."""
    script = (
        INIT
        + "import time, signal\nif weft.rank() == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\nweft.barrier()\n"
    )
    done = run_ranks(
        3, script.replace("2})", "3})"), warm=True, timeout=60, env={"TORCH_CPP_LOG_LEVEL": "INFO"}
    )
    assert done.returncode == 137
    assert "TCPStore" not in done.stderr and "recvValue" not in done.stderr, done.stderr
    assert first_line(done).startswith("weft: rank 0 on"), done.stderr


def test_the_script_finds_what_python_would_give_it(tmp_path: Path):
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pickle, inspect\n"
        "from multiprocessing import get_context\n"
        "from dataclasses import dataclass\n"
        "class Own:\n    pass\n"
        "def more(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    sys.path.append('')\n"
        "    import beside\n"
        "    found = [sys.argv[1:], beside.value, type(pickle.loads(pickle.dumps(Own()))) is Own, __spec__, __doc__]\n"
        "    found += [sys.argv[0] == sys.modules['__main__'].__file__, 'pass' in inspect.getsource(Own)]\n"
        "    with get_context('spawn').Pool(1) as pool:\n        found.append(pool.map(more, [1]))\n"
        "    print(found, sorted(set(globals()) - {'__annotations__'})[:9])\n"
    )
    done = run_ranks(1, script, ["a", "--b"], timeout=60).check()
    assert "[['a', '--b'], 7, True, None, None, True, True, [2]]" in done.stdout, done.stdout + done.stderr
    assert "FILE" not in done.stdout


HANDLING = """
import sys
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 2})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters()))


@weft.step
def step(model, x):
    model.backward((model(x) - x).square().mean())


def train():
    for number in range(8):
        if number == 2 and weft.rank() == 1:
            raise ValueError("broken")
        step(model, torch.ones(4, 8))
        optimizer.step()


CLEANS_UP = {
    "a barrier": weft.barrier,
    "PyTorch's barrier": torch.distributed.barrier,
    "a state": model.state_dict,
    "a save": lambda: weft.save_checkpoint(sys.argv[2], "last", model=model, optimizer=optimizer),
    "a sum": lambda: torch.distributed.all_reduce(torch.ones(1)),
    "a step": lambda: step(model, torch.ones(4, 8)),
}
if sys.argv[1] == "a step":
    try:
        train()
    except ValueError:
        weft.allgather("over")
else:
    try:
        train()
    finally:
        CLEANS_UP[sys.argv[1]]()
"""


@pytest.mark.parametrize(
    "what", one_in(3, ["a barrier", "PyTorch's barrier", "a state", "a save", "a sum", "a step"])
)
def test_an_exception_stands_first_whatever_its_handler_waits_for(what: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(HANDLING)
    done = run_ranks(2, script, [what, str(tmp_path / "saved")], warm=True, timeout=60)
    assert done.returncode == 1
    assert re.match(WHO.format(1) + r"step 2(, \S.*)?: ValueError: broken$", first_line(done)), done.stderr
    assert not list(tmp_path.glob("saved/*/done")) and "weft.errors" not in first_line(done)
