"""Scripts come from anywhere: what is no Python is refused in one sentence, and nothing of a script runs."""

from __future__ import annotations

import pytest

from tests.unit.check.scripts import found
from weft.check import check_script, read_script
from weft.check.script import LIMIT_BYTES, parse_script, rewritten
from weft.errors import FormatError

HOSTILE = {
    "a null byte": (b"x = 1\0", "this is not Python"),
    "no text": (b"\xff\xfe\x00", "it is not text in UTF-8: byte 0 is wrong"),
    "no Python": (
        b"x = 1\nif x\n",
        r"script\.py:2: this is not Python \(expected ':'\): mend that line first",
    ),
    "deep brackets": (b"(" * 5000 + b")" * 5000, "this is not Python"),
    "a long chain": (b"x = " + b"-" * 100_000 + b"1", "this is not Python|cannot be checked"),
    "ten megabytes": (b"x = 1\n" * 1_700_000, f"has more than {LIMIT_BYTES} bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_script_is_refused(name, tmp_path):
    content, message = HOSTILE[name]
    path = tmp_path / "script.py"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        check_script(path)


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"none\.py\" cannot be read \(No such file or directory\)"):
        check_script(tmp_path / "none.py")


def test_a_script_does_not_run(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    assert check_script(path) == []
    assert [*tmp_path.iterdir()] == [path]


def test_a_mark_of_the_byte_order_and_old_escapes_are_read(tmp_path):
    path = tmp_path / "script.py"
    path.write_bytes(b"\xef\xbb\xbfx = '\\d'\n")
    assert check_script(path) == []


@pytest.mark.parametrize(
    "text",
    [
        "x" + ".a" * 900,
        "x = 1" + " + rank" * 900,
        "if rank() == 0:\n    torch.save(x, 'f')\n" * 3000,
        "import torch\n" + "torch.save(x, 'f')\n" * 5000,
        "def f():\n    g()\n    g()\ndef g():\n    f()\n    f()\nf()\nloss.backward()\n",
        "".join(f"def f{n}():\n" + f"    f{n + 1}()\n" * 40 for n in range(30))
        + "def f30():\n    loss.backward()\n",
        "for x in y:\n    loss.backward()\n    print(loss)\n" * 3000,
        "lambda: (yield)\nmatch x:\n    case {'a': [1, *_]}:\n        pass\n",
        "x: int\nx = y = z\n(a, *b), c = 1, 2\nasync def f():\n    async for q in r:\n        loss.backward()\n",
    ],
)
def test_strange_scripts_are_read(text):
    assert isinstance(found(text), list)


def test_names_stand_for_what_was_imported():
    script = parse_script(
        "import torch.nn.functional as F\nimport torch.optim\nfrom torch import nn as n\n"
        "import smdistributed.modelparallel.torch as smp\nfrom weft.torch import step as s\n"
        "F.relu; torch.optim.SGD; n.Linear; smp.nn.x; s; f().g\n"
    )
    names = [script.name(node.value) for node in script.tree.body if hasattr(node, "value")]
    assert names == [
        "torch.nn.functional.relu",
        "torch.optim.SGD",
        "torch.nn.Linear",
        "weft.torch.nn.x",
        "weft.torch.step",
        "",
    ]


def test_settings_are_read_where_they_are_written_down():
    script = parse_script(
        "import weft.torch as w\nM = 2 * 4\nw.init({'pipeline_parallel_degree': 3, 'microbatches': M})\n"
    )
    assert script.settings == {"partitions": 3, "microbatches": None}
    script = parse_script("import weft.torch as w\nw.init(config)\n")
    assert script.settings is None


def test_the_file_is_given_by_its_path(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("x = 1\n")
    assert read_script(path).assigned.keys() == {"x"}


def test_a_call_is_rewritten_in_its_place():
    call = parse_script("f(a, 30, True, num_workers=2, **more)").calls[0]
    names = ("data", "batch_size", "shuffle")
    assert rewritten(call, names, without=("shuffle",), batch_size="28", num_workers="1", last="True") == (
        "f(a, 28, False, num_workers=1, **more, last=True)"
    )
