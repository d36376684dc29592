"""`weft trace`, in this process: from a script to a graph that the other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.graph import Graph

HEAD = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

net = nn.Sequential(*(Block() for _ in range(4)))
x = torch.randn(8, 8)
"""


@pytest.fixture
def script(tmp_path: Path):
    """Writes a script that ends with these lines, and traces it."""

    def trace(body: str, *arguments: str, function: str = ":example", code: int = 0) -> Graph | None:
        path, out = tmp_path / "my_training.py", tmp_path / "my.graph.json"
        path.write_text(HEAD + body)
        assert main(["trace", f"{path}{function}", "--out", str(out), *arguments]) == code
        return Graph.from_json(out.read_text()) if code == 0 else None

    return trace


def names(graph: Graph) -> list[str]:
    return [unit.name for unit in graph]


def test_a_tensor_for_the_model(script, capsys):
    graph = script("def example():\n    return net, x")
    assert names(graph) == [f"{i}.{part}" for i in range(4) for part in ("up", "down")]
    assert all(unit.forward_ms > 0 and unit.backward_ms > 0 for unit in graph)
    assert [unit.parameters for unit in graph][:2] == [16 * 8 + 16, 8 * 16 + 8]
    assert graph.units[0].output_bytes == 8 * 16 * 4
    assert [(t.source, t.targets, t.bytes) for t in graph.tensors][:3] == [
        ("0.up", ("0.down",), 512),
        ("0.down", ("1.up", "1.down"), 256),
        ("1.up", ("1.down",), 512),
    ]
    assert "my.graph.json: 8 units, 7 tensors between them, 4.38 KiB of parameters" in capsys.readouterr().out


def test_fewer_units_and_microbatches(script):
    graph = script("def example():\n    return net, x", "--units", "4", "--microbatches", "4")
    assert names(graph) == ["0", "1", "2", "3"]
    assert [tensor.bytes for tensor in graph.tensors] == [2 * 8 * 4] * 3
    assert 4 < len(script("def example():\n    return net, x", "--units", "5")) < 8


@pytest.mark.parametrize(
    "body",
    [
        "return net, (x,)",
        "return [net, [x]]",
        "return net, {'input': x}",
        "return net, x, lambda result: result.pow(2).mean()",
        "return net, x, lambda result, batch: (result - batch).pow(2).mean()",
        "return net, x, lambda result, scale=2.0: scale * result.sum()",
    ],
)
def test_other_mini_batches_and_losses(script, body: str):
    assert len(script(f"def example():\n    {body}")) == 8


def test_the_function_is_called_example_unless_it_is_named(script):
    assert len(script("def example():\n    return net, x", function="")) == 8
    assert len(script("def other():\n    return net, x", function=":other")) == 8


def test_a_loss_that_the_model_returns(script):
    body = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net

    def forward(self, x, labels):
        result = self.body(x)
        return {"loss": (result - labels).pow(2).mean(), "logits": result}

def example():
    return Head(), {"x": x, "labels": x}
"""
    assert names(script(body))[0] == "body.0.up"


def test_tied_parameters_make_a_group(script):
    graph = script("net[3].up.weight = net[0].up.weight\ndef example():\n    return net, x", "--units", "8")
    assert graph.groups == {"tied0": (0, 6)}


def test_a_model_without_memory_is_estimated(script):
    graph = script("def example():\n    return net.to('meta'), x")
    assert len(graph) == 8 and all(unit.forward_ms > 0 for unit in graph)
    again = script("def example():\n    return net.to('meta'), x")
    assert graph == again, "nothing is measured"


def test_a_model_that_is_one_unit_and_nothing_to_train(script):
    graph = script("def example():\n    return nn.Linear(8, 8).requires_grad_(False), x")
    assert names(graph) == ["Linear"]
    assert graph.units[0].backward_ms == pytest.approx(2 * graph.units[0].forward_ms)


def test_the_graph_goes_into_the_simulation(script, tmp_path: Path, capsys):
    script("def example():\n    return net, x")
    capsys.readouterr()
    arguments = ["--partitions", "2", "--microbatches", "4", "--schedule", "zb_h1", "--json"]
    assert main(["simulate", str(tmp_path / "my.graph.json"), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(len(rank["units"]) for rank in report["ranks"]) == 8 and report["step_ms"] > 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "",
            "has no function example: write one that returns the model and a mini-batch, def example(): return",
        ),
        ("example = 3", "has no function example"),
        (
            "def example():\n    return net",
            "returned a value of the type Sequential: return model, batch or model, batch, loss",
        ),
        ("def example():\n    pass", "example() returned nothing: return model, batch or"),
        (
            "def example():\n    return net, x, None, x",
            "returned a value of the type tuple, of length 4: return model, batch",
        ),
        (
            "def example():\n    return x, net",
            "returned a tensor of the shape [8, 8] in place of the model: return",
        ),
        (
            "def example():\n    return net, 3",
            "a value of the type int in place of the mini-batch (a tensor, a tuple or a dict)",
        ),
        (
            "def example():\n    return net, x, 3",
            "a value of the type int in place of the loss function: return",
        ),
        (
            "def example():\n    return net, x, lambda y: y",
            "the loss function returned a tensor of the shape [8, 8]:",
        ),
        ("def example():\n    return nn.Tanh(), x", "Tanh holds no parameters, so there is nothing to place"),
    ],
)
def test_mistakes_are_told_in_a_line(script, body: str, text: str, capsys):
    script(body, code=2)
    error = capsys.readouterr().err
    assert text in error and error.startswith("weft trace: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero; what trains belongs under"),
        ("raise SystemExit('no data')", "cannot be imported: SystemExit: no data"),
        ("def example():\n    raise ValueError('mine')", "example() failed: ValueError: mine"),
        (
            "def example():\n    return net, torch.ones(8, 3)",
            "the model failed on its mini-batch: RuntimeError: ",  # and PyTorch's text, which differs by version
        ),
        ("def example():\n    return net, {'y': x}", "the model failed on its mini-batch: TypeError: "),
    ],
)
def test_what_fails_in_the_script_shows_its_traceback(script, body: str, text: str, capsys):
    script(body, code=2)
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n")
    last = error.splitlines()[-1]
    assert last.startswith("weft trace: error: ") and text in last
    if "example" not in body or "mine" in body:
        assert 'my_training.py", line' in error.splitlines()[1], "weft's own frames are left out"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["nowhere.py:example"],
            "there is no file nowhere.py: give a script and its function, for example train.py:ex",
        ),
        (["{folder}/notes.txt:example"], "notes.txt is not a script of Python: its name must end in .py"),
        (["nowhere.py", "--units", "0"], "--units is 0: it must be at least 1"),
        (["nowhere.py", "--microbatches", "-1"], "--microbatches is -1: it must be at least 1"),
    ],
)
def test_mistakes_in_the_command(arguments: list[str], text: str, tmp_path: Path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(["trace", *arguments, "--out", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_a_mini_batch_of_any_size(script):
    """Nothing is trained, so microbatches need not be equal."""
    assert script("def example():\n    return net, x", "--microbatches", "3") is not None
