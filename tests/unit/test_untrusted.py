"""Numbers, texts and files from elsewhere size nothing before they were checked, and fail in one sentence."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import weft
from weft import schedule
from weft.cli.main import main
from weft.config import parse_assignments, resolve
from weft.document import Document
from weft.errors import ConfigError, FormatError, LaunchError, WeftError
from weft.graph import Graph, read_profile
from weft.launch.discovery import discover, expand_hosts
from weft.profiler.format import Header
from weft.profiler.reading import read_recording
from weft.timeline import Timeline
from weft.units import parse_bytes, parse_rate, parse_seconds
from weft.untrusted import read_limited, shown_path

GRAPH = '{"weft": "graph", "version": 1, "units": [%s]}'
UNIT = '{"name": %s, "forward_ms": %s, "backward_ms": 1, "parameter_bytes": %s, "activation_bytes": 1}'
LONG = "9" * 5000
ONE = "9" * 400


def unit(name: str = '"a"', forward: str = "1", size: str = "1") -> str:
    return GRAPH % (UNIT % (name, forward, size))


TEXTS = {
    "a profile with a number of 400 digits": lambda: read_profile(
        f"a -- b -- forward_compute_time={ONE}, backward_compute_time=1, activation_size=1, parameter_size=1"
    ),
    "a graph with a number of 400 digits": lambda: Graph.from_json(unit(size=ONE)),
    "a graph with a time of 400 digits": lambda: Graph.from_json(unit(forward=ONE)),
    "a graph with a number of 5000 digits": lambda: Graph.from_json(unit(size=LONG)),
    "a graph with half a character": lambda: Graph.from_json(unit(name='"\\ud800"')),
    "a graph of brackets": lambda: Graph.from_json("[" * 10**7),
    "a graph with a name of a megabyte": lambda: Graph.from_json(unit().replace("forward_ms", "f" * 10**6)),
    "a timeline with a rank of 19 digits": lambda: Timeline.from_json(
        '{"weft": "timeline", "version": 1, "spans": [[999999999999999999, "F", 0, 0, 1, 0, ""]]}'
    ),
    "a timeline at the end of time": lambda: Timeline.from_json(
        '{"weft": "timeline", "version": 1, "spans": [[0, "F", 0, -1e308, 1e308, 0, ""]]}'
    ),
    "a timeline with a time of 400 digits": lambda: Timeline.from_json(
        '{"weft": "timeline", "version": 1, "spans": [[0, "F", 0, 0, ' + ONE + ', 0, ""]]}'
    ),
    "a stage of 9 digits": lambda: schedule.from_csv("0F0,0B0\n999999999F0,999999999B0\n"),
    "a stage that leaves others out": lambda: schedule.from_csv("0F0,0B0\n999999F0,999999B0\n"),
    "a microbatch of 5000 digits": lambda: schedule.from_csv(f"0F{LONG}"),
    "a microbatch that leaves others out": lambda: schedule.from_csv("0F0,0B0,0F999999,0B999999"),
    "a CSV with a field of a megabyte": lambda: schedule.from_csv('"' + "0" * 10**6),
    "a size of 1e400": lambda: parse_bytes("1e400GiB"),
    "a size of 5000 digits": lambda: parse_bytes(f"{LONG}GiB"),
    "a rate of 1e400": lambda: parse_rate("1e400GB/s"),
    "a duration of 1e400": lambda: parse_seconds("1e400s"),
    "a document that is a number of 5000 digits": lambda: Document(10**5000).text(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_hostile_text_is_refused_in_one_sentence(text):
    with pytest.raises(WeftError) as caught, little_memory():
        TEXTS[text]()
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    str(caught.value).encode()


@contextmanager
def little_memory(more: int = 300 << 20) -> Iterator[None]:
    """This process gets so many bytes more and not more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path):
    (tmp_path / "small").write_bytes(b"123")
    with open(tmp_path / "small", "rb") as file, little_memory(64 << 20):
        assert read_limited(file, 1 << 40) == b"123"
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    with open(tmp_path / "large", "rb") as file:
        assert 1000 < len(read_limited(file, 1000)) < 9 << 20


def test_a_document_has_a_limited_number_of_values():
    with pytest.raises(FormatError, match="about 6000001 values, and more than 5000000 are not read"):
        Document.parse("[" + "0," * 6_000_000 + "0]", kind="graph", version=1)


@pytest.mark.parametrize(
    ("ranks", "rank", "offset_s"), [((1 << 31) - 1, 0, 0.0), (2, 2, 0.0), (2, 0, float("nan")), (2, 0, 1e300)]
)
def test_a_recording_with_a_header_that_cannot_be(tmp_path, ranks, rank, offset_s):
    (tmp_path / "rank0.spans").write_bytes(Header(rank, ranks, offset_s, bytes(16)).pack())
    with pytest.raises(FormatError, match="which cannot be: record again"), little_memory():
        read_recording(tmp_path)


def test_many_missing_ranks_are_not_listed(tmp_path):
    header = Header(0, 1_000_000, 0.0, bytes(16)).pack()
    record = (
        bytes.fromhex("0" * 32)
        + (1).to_bytes(4, "little")
        + bytes(8)
        + b"\0\0"
        + (0x5EAF).to_bytes(2, "little")
    )
    (tmp_path / "rank0.spans").write_bytes(header + record)
    with little_memory():
        (warning,) = read_recording(tmp_path).warnings
    assert warning.endswith("no readable file of rank 1, 2, 3, 4, 5, 6, 7, 8 and others")


# --- the environment ------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0",
}  # fmt: skip


def test_only_the_first_host_of_a_node_list_is_made():
    with little_memory():
        assert discover({**SLURM, "SLURM_STEP_NODELIST": "a[1-99999999999]"}).leader == "a1"
        assert (
            discover(
                {**SLURM, "SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "4(x1000000)"}
            ).local_size
            == 4
        )


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NODELIST": f"a[1-{LONG}]"},
        {"SLURM_STEP_NODELIST": f"a{'[1]' * 5000}"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x99999999999)", "SLURM_NODEID": "99999999998"},
        {"SLURM_STEP_TASKS_PER_NODE": f"{LONG}(x2)"},
        {"SLURM_JOB_ID": "\N{SUPERSCRIPT TWO}"},
        {"SLURM_JOB_ID": LONG},
        {"SLURM_NODEID": "\N{SUPERSCRIPT TWO}"},
        {"SLURM_NTASKS": "9" * 18},
        {"SLURM_NTASKS": LONG},
        {"WEFT_LEADER": "host:\N{SUPERSCRIPT TWO}"},
        {"WEFT_LEADER": f"host:{LONG}"},
    ],
    ids=lambda variables: "-".join(variables),
)
def test_hostile_variables_of_launchers_are_refused(variables):
    with pytest.raises(LaunchError) as caught, little_memory():
        discover({**SLURM, **variables})
    assert len(str(caught.value)) < 500


def test_a_list_of_hosts_is_made_as_it_is_asked_for():
    hosts = expand_hosts("a[1-99999999999]b[07-08]")
    assert [next(hosts) for _ in range(3)] == ["a1b07", "a1b08", "a2b07"]


@pytest.mark.parametrize(
    "text",
    ["[" * 10**6, LONG, '{"partitions": ' + LONG + "}", '{"memory_limit": ' + ONE + "}", '{"partitions": 10000000000}',
     '{"' + "x" * 10**6 + '": 1}', "/dev/zero", "a" * 5000, "a\0b", '{"pipeline": "\\ud800"}'],
    ids=lambda text: text[:20],
)  # fmt: skip
@pytest.mark.parametrize("variable", ["WEFT_CONFIG", "WEFT_SET"])
def test_hostile_settings_are_refused(variable, text):
    if text == "/dev/zero" and variable == "WEFT_SET":
        pytest.skip("it names no file")
    with pytest.raises(ConfigError) as caught, little_memory(900 << 20):
        resolve(None, {variable: text})
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()


def test_hostile_arguments_of_init_are_refused():
    for values in (
        {"partitions": 10**5000},
        {"memory_limit": 10**400},
        {"pipeline": 10**5000},
        {10**5000: 1},
    ):
        with pytest.raises(ConfigError):
            resolve(values)


def test_hostile_assignments_are_texts():
    assert parse_assignments([f"a={LONG}", "b=" + "[" * 10**6]) == {"a": LONG, "b": "[" * 10**6}


# --- no other way in ------------------------------------------------------------------------------------------

WAYS = {
    r"\.read_text\(": {"profiler", "runtime", "watch", "transport", "report", "launch", "cli/verify.py"},
    r"\.read_bytes\(": {  # a notebook's own function, in a folder that nobody else may write
        "profiler/clock.py", "launch/running/notebook.py", "launch/running/notebook_rank.py",
    },
    r"\.read\(\w*(limit|LIMIT)": set(),
    r"csv\.reader\(": {"schedule/file.py"},
    r"pickle\.(loads?|Unpickler)\(": {"communication/serialise.py"},
    r"torch\.load\(": {"torch/checkpoint/formats/torch_file.py", "compat/written.py"},
    r"safe_open\(": {"torch/checkpoint/formats/source.py"},
    r"\.isdigit\(|\.isdecimal\(": {
        "untrusted.py", "profiler/recorder.py", "profiler/host/linux.py", "launch/guard.py",
        "plan/parallelism/traced.py",
        "watch/sidecar/program.py",  # names of /proc; it uses Python's own library only
    },
    r"int\((os\.)?environ": set(),
    r"json\.loads\(": {
        "untrusted.py", "watch", "report/chrome.py", "launch", "cli/verify.py", "checkpoint/agree.py",
        "checkpoint/meeting.py", "checkpoint/save.py", "checkpoint/shard.py", "checkpoint/stop.py",
        "communication/messages.py",
        "compat/modelparallel/optimizer.py", "plan/chosen.py", "session", "tensorflow/split/decide.py", "torch",
    },
}  # fmt: skip
"""What reads from outside, and where it may stand: what the kernel says, what ranks of the job tell each other,
and what was written right before."""


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_read_goes_through_one_module(way):
    root = Path(weft.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(way, re.sub(r'"""(.|\n)*?"""', "", path.read_text(encoding="utf-8")))
    }
    others = {
        name for name in found if not any(name == one or name.startswith(f"{one}/") for one in WAYS[way])
    }
    assert not others, f"{sorted(others)}: read by weft.untrusted, or say here why not"


def test_files_of_torch_and_checkpoints_are_no_messages():
    """What reads files does not parse JSON by itself."""
    weft_root = Path(weft.__file__).parent
    root = weft_root / "torch"
    files = ("export", "named_state", "older_scripts", "tensor_files", "whole_file")
    values = (weft_root / "communication" / "serialise.py", root / "tensors" / "saved_values.py")
    readers = [*values, *(root / "checkpoint" / f"{name}.py" for name in files)]
    for path in [*readers, *(root / "checkpoint" / "formats").glob("*.py")]:
        assert "json.loads(" not in path.read_text(encoding="utf-8"), path


# --- commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["partition", "{graph}", "--partitions", "99999999999"],
        ["partition", "{graph}", "--partitions", "1000", "--chunks", "1000000"],
        ["partition", "{graph}", "--partitions", "2", "--memory", "1e400GiB"],
        ["simulate", "{graph}", "--partitions", LONG],
        ["simulate", "{graph}", "--partitions", "100000"],
        ["simulate", "{graph}", "--partitions", "2", "--microbatches", "1000000"],
        ["simulate", "{graph}", "--partitions", "2", "--schedule", "file", "--csv", "{stage}"],
        ["simulate", "/dev/zero", "--partitions", "2"],
        ["draw", "{graph}", "--out", "x.svg"],
        ["draw", "x" * 5000, "--out", "x.svg"],
        ["draw", "{graph}", "--out", "x" * 5000 + ".svg"],
    ],
    ids=lambda arguments: "-".join(arguments)[:60],
)
def test_commands_end_with_one_line(arguments, tmp_path, capsys):
    (tmp_path / "graph.json").write_text(unit())
    (tmp_path / "stage.csv").write_text("0F0,0B0\n999999999F0,999999999B0\n")
    places = {"{graph}": str(tmp_path / "graph.json"), "{stage}": str(tmp_path / "stage.csv")}
    with little_memory(900 << 20):
        try:
            code = main([places.get(argument, argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    assert code == 2 and capsys.readouterr().err.count("\n") == 1


def test_names_that_a_terminal_cannot_show(tmp_path):
    """Half a character in a file's name comes from bytes that are no UTF-8."""
    path = tmp_path / "g\udcff.json"
    path.write_text(json.dumps({"weft": "nothing"}))
    done = subprocess.run(
        [sys.executable, "-m", "weft", "draw", path, "--out", tmp_path / "x.html"], capture_output=True
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr, done.stderr


def test_a_path_that_is_no_unicode_can_be_printed():
    assert shown_path(Path("a\udcff.json")).encode() == rb"a\udcff.json"
