"""`weft partition`: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.graph import Graph, Unit, read_profile, transformer
from weft.schedule import make
from weft.simulate import StageCost, simulate

PROFILES = Path(__file__).parents[2] / "data" / "profiles"
VGG16 = str(PROFILES / "vgg16.txt")


@pytest.fixture
def graph(tmp_path: Path) -> str:
    """Four units of 3 ms, in a file."""
    path = tmp_path / "four.graph.json"
    units = [Unit(f"block{i}", 1.0, 2.0, 1024, 512, output_bytes=1000, parameters=256) for i in range(4)]
    path.write_text("\n " + Graph(units).to_json())
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["partition", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("partitions", "largest_ms"), [(2, 377.045), (4, 221.860), (8, 159.531)])
def test_a_profile(partitions, largest_ms, capsys):
    found = run(capsys, VGG16, "--partitions", str(partitions), "--memory-weight", "0", "--microbatches", "8")
    assert [one["index"] for one in found["partitions"]] == list(range(partitions))
    assert max(one["time_ms"] for one in found["partitions"]) == pytest.approx(largest_ms)
    assert 8 * largest_ms < found["step_ms"] < (8 + partitions - 1) * largest_ms
    known = {unit.name: unit for unit in read_profile(Path(VGG16).read_text())}
    stages = []
    for one in found["partitions"]:
        units = [known[name] for name in one["units"]]
        stages.append(StageCost(sum(u.forward_ms for u in units), sum(u.backward_ms for u in units)))
    made = make("1f1b", partitions, 8)
    assert found["step_ms"] == pytest.approx(simulate(made.ranks, made.rank_of_stage, stages).step_s)
    names = [name for one in found["partitions"] for name in one["units"]]
    assert names[:2] == ["node1", "node2"] and len(names) == len(set(names)) == 41


def test_json_of_a_graph(graph, capsys):
    found = run(capsys, graph, "--partitions", "2", "--link", "1GB/s,1ms", "--microbatches", "3")
    first = found["partitions"][0]
    assert first["units"] == ["block0", "block1"]
    assert first["time_ms"] == pytest.approx(6 + 2 * 1.001)
    assert (first["parameter_bytes"], first["activation_bytes"]) == (2048, 1024)
    assert [one["memory_bytes"] for one in found["partitions"]] == [4 * 2048 + 2 * 1024, 4 * 2048 + 1024]
    # rank 0: F0 0-2, F1 2-4, B0 10.002-14.002, F2 -16.002, B1 -20.002, B2 24.004-28.004
    assert found["step_ms"] == pytest.approx(28.004) and found["optimal"]
    assert found["segments"] == {"block0": 0, "block1": 0, "block2": 1, "block3": 1}


def test_tables(graph, capsys):
    assert main(["partition", graph, "--partitions", "2", "--memory", "16KiB"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "unit    partition  parameters  bytes  forward ms  backward ms   time",
        "------  ---------  ----------  -----  ----------  -----------  -----",
        "block0          0         256  1 KiB        1.00         2.00  25.0%",
        "block1          0         256  1 KiB        1.00         2.00  25.0%",
        "block2          1         256  1 KiB        1.00         2.00  25.0%",
        "block3          1         256  1 KiB        1.00         2.00  25.0%",
        "",
        "partition  units  time ms  transfer ms  parameters  memory   limit  of mean",
        "---------  -----  -------  -----------  ----------  ------  ------  -------",
        "        0      2    6.000        0.000       2 KiB  10 KiB  16 KiB   100.0%",
        "        1      2    6.000        0.000       2 KiB   9 KiB  16 KiB   100.0%",
        "",
        "largest partition: 6.000 ms, 100.0% of the mean (the least possible)",
        "a step of 2 microbatches by 1f1b: 18.000 ms (weft simulate tries all schedules)",
    ]


def test_a_split_that_cannot_be_even_is_warned_about(tmp_path, capsys):
    path = tmp_path / "uneven.json"
    path.write_text(Graph([Unit("large", 6.0, 12.0, 0, 0), Unit("small", 1.0, 1.0, 0, 0)]).to_json())
    assert main(["partition", str(path), "--partitions", "4"]) == 0
    warning = capsys.readouterr().out.strip().splitlines()[-1]
    assert warning == (
        "warning: 2 of 4 partitions have no units; the busiest has 360% of the mean. The largest unit, large, takes "
        "18.000 ms of 20.000 ms in all: open it (weft trace --units), or give fewer partitions"
    )


def test_options_reach_the_problem(graph, capsys):
    speeds = run(capsys, graph, "--partitions", "2", "--speeds", "3,1")
    assert [len(one["units"]) for one in speeds["partitions"]] == [3, 1]
    memory = run(capsys, graph, "--partitions", "2", "--memory", "5KiB,20KiB", "--microbatches", "1")
    assert [len(one["units"]) for one in memory["partitions"]] == [1, 3]
    chunks = run(capsys, graph, "--partitions", "2", "--chunks", "2", "--layout", "v")
    assert [one["units"] for one in chunks["partitions"]] == [["block0", "block3"], ["block1", "block2"]]


def test_refining_makes_the_step_shorter(tmp_path, capsys):
    """The exact cut shuns the large tensor in the middle, but its transfer hides behind computing."""
    path = tmp_path / "six.graph.json"
    units = [Unit(f"u{i}", 1.0, 2.0, 0, 0, output_bytes=2000 if i == 2 else 8) for i in range(6)]
    path.write_text(Graph(units).to_json())
    arguments = [str(path), "--partitions", "2", "--link", "1MB/s", "--microbatches", "16"]
    start, better = run(capsys, *arguments), run(capsys, *arguments, "--refine")
    assert sorted(len(one["units"]) for one in start["partitions"]) == [2, 4]
    assert [len(one["units"]) for one in better["partitions"]] == [3, 3]
    assert better["step_ms"] < start["step_ms"] and better["largest_ms"] > start["largest_ms"]


def test_a_large_problem_is_estimated(tmp_path, capsys):
    path = tmp_path / "many.graph.json"
    path.write_text(Graph(Unit(f"u{i}", 1.0, 2.0, 0, 0) for i in range(256)).to_json())
    found = run(capsys, str(path), "--partitions", "256", "--microbatches", "1000")
    assert found["step_ms"] == pytest.approx(3 * 1255)


def test_the_tree_and_what_is_not_the_optimum(tmp_path, capsys):
    path = tmp_path / "gpt.graph.json"
    path.write_text(transformer(4, 64, 2, 256, 1000, 32).to_json())
    assert main(["partition", str(path), "--partitions", "3", "--algorithm", "tree"]) == 0
    assert "of the mean (none is below 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.json", "--partitions", "2"], '"nowhere.json" cannot be read (No such file or directory'),
        (
            [VGG16, "--partitions", "0"],
            "--partitions is 0: it must be at least 1, for example --partitions 4",
        ),
        ([VGG16, "--partitions", "2", "--microbatches", "0"], "--microbatches is 0: it must be at least 1"),
        ([VGG16, "--partitions", "2", "--chunks", "0"], "--chunks is 0: it must be at least 1"),
        (
            [VGG16, "--partitions", "2", "--memory", "24Gib"],
            '"24Gib" is not a size: its unit is "Gib", known',
        ),
        ([VGG16, "--partitions", "2", "--memory", "1B"], "no placement keeps within the memory limits"),
        (
            [VGG16, "--partitions", "3", "--memory", "1GiB,2GiB"],
            "--memory has 2 values for 3 partitions: give one, or 3",
        ),
        ([VGG16, "--partitions", "2", "--speeds", "a,b"], '"a" is not a speed: write a number, for example'),
        (
            [VGG16, "--partitions", "2", "--speeds", "0"],
            "the speed of device 0 is 0.0, it must be a number above",
        ),
        ([VGG16, "--partitions", "2", "--link", "fast"], '"fast" is not a duration'),
        (
            [VGG16, "--partitions", "2", "--link", "0GB/s"],
            "its bandwidth is 0.0 bytes/s, it must be more than 0",
        ),
        (
            [VGG16, "--partitions", "2", "--memory-weight", "1.5"],
            "memory_weight is 1.5, it must be a number from",
        ),
        ([VGG16], "the following arguments are required: --partitions; see weft partition --help"),
        ([VGG16, "--partitions", "two"], "argument --partitions: 'two' is no whole number up to 1000000"),
        ([VGG16, "--partitions", "2", "--algorithm", "best"], "argument --algorithm: invalid choice: 'best'"),
        ([VGG16, "--partitions", "2", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys):
    try:
        code = main(["partition", *arguments])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out == ""
    assert text in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"weft": "graph", "version": 1, "units": [{}]}', '$.units[0]: "name" is missing'),
        (b'{"weft": "graph"', "this is not JSON, so it cannot be a graph"),
        (b"", "line 1: there is no layer"),
        (b"node1 -- ReLU\n", 'line 1: "node1 -- ReLU" is not a layer'),
        (b"\xff\xfe", "cannot be read (it is not text in UTF-8"),
    ],
)
def test_bad_files_are_told_by_name(content, text, tmp_path, capsys):
    path = tmp_path / "graph"
    path.write_bytes(content)
    assert main(["partition", str(path), "--partitions", "2"]) == 2
    shown = capsys.readouterr().err
    assert text in shown and str(path) in shown and shown.count("\n") == 1
