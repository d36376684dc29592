"""What Prometheus is told of a job, and that whatever else comes to the port does no harm."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launching import started
from weft.analysis.run import Step
from weft.cli.main import main
from weft.errors import LaunchError
from weft.profiler.live.metrics import MOST_VALUES, Collector, Endpoint, Logged, Pace
from weft.profiler.steps import line_of
from weft.watch.heartbeat import Sign, State

pytest.importorskip("prometheus_client")

SIGNS = {
    0: Sign(State.RUNNING, pid=7, step=12, evaluations=2, idle=0.25, memory_bytes=1000),
    1: Sign(State.FINISHED, pid=8, step=10, idle=0.5),
    2: Sign(),
}


def told(endpoint: Endpoint) -> dict[str, float]:
    """The lines of a scrape, as they are named there."""
    with urllib.request.urlopen(endpoint.address, timeout=30) as answer:
        text = answer.read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def endpoint():
    found = Endpoint(0)
    yield found
    found.close()


def test_what_the_page_shows(endpoint, tmp_path):
    endpoint.start(Collector(lambda: SIGNS, None, tmp_path))
    assert told(endpoint) == {
        'weft_up{rank="0"}': 1, 'weft_steps_total{rank="0"}': 10, 'weft_memory_bytes{rank="0"}': 1000,
        'weft_up{rank="1"}': 0, 'weft_steps_total{rank="1"}': 10,
    }  # fmt: skip


def test_a_step_is_timed_from_outside():
    now = [0.0]
    pace = Pace(lambda: now[0])
    seen = []
    for now[0], steps in ((0.0, 4), (2.0, 4), (3.0, 6), (4.0, 6), (5.0, 1), (6.0, 5)):
        seen.append(pace.of(0, steps))
    assert seen == [0.0, 0.0, 1.5, 1.5, 1.5, 0.25]


def test_a_recording_tells_more(endpoint, tmp_path):
    steps = [Step(step, 2.0 * step, 1.0, work_s=0.5, samples=32, memory_bytes=77) for step in range(1, 41)]
    (tmp_path / "rank0.steps.jsonl").write_text("".join(line_of(step) + "\n" for step in steps))
    endpoint.start(Collector(lambda: SIGNS, tmp_path, tmp_path))
    found = told(endpoint)
    assert found['weft_step_seconds{rank="0"}'] == 2.0 and found['weft_samples_per_second{rank="0"}'] == 16
    assert found['weft_idle_ratio{rank="0"}'] == 0.75 and found['weft_memory_bytes{rank="0"}'] == 77


def test_logged_values_with_any_name(endpoint, tmp_path):
    name = 'a "b"\n\\ \x1b'
    lines = [{"step": 1, "values": {"loss": 2.0, name: 1, "text": "x"}}, {"step": 2, "values": {"loss": 1.5}}]
    (tmp_path / "x-7.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "x-9.jsonl").write_text('{"values": {"other": 1}}\n')
    endpoint.start(Collector(lambda: SIGNS, None, tmp_path))
    values = {key: value for key, value in told(endpoint).items() if key.startswith("weft_value")}
    assert values['weft_value{name="loss",rank="0"}'] == 1.5 and len(values) == 2
    assert all(key.isprintable() for key in values)


def test_a_rank_has_a_limited_number_of_series(tmp_path):
    path = tmp_path / "x-7.jsonl"
    path.write_text(json.dumps({"values": {f"v{number}": number for number in range(1000)}}) + "\n")
    logged = Logged(tmp_path)
    assert len(logged.of(7)) == MOST_VALUES <= 30 - 6
    with path.open("a") as file:
        file.write('nonsense\n[]\n{"values": 3}\n{"values": {"v0": 9, "new": 1}}\n{"values": {"v0"')
    assert logged.of(7)["v0"] == 9.0 and "new" not in logged.of(7)
    assert logged.of(8) is not None


def test_a_file_of_an_earlier_job_with_the_same_process_is_none_of_this_one(tmp_path):
    old, new = tmp_path / "20260101-000000-7.jsonl", tmp_path / "20260102-000000-7.jsonl"
    old.write_text('{"values": {"loss": 9}}\n')
    os.utime(old, (1000, 1000))
    logged = Logged(tmp_path)
    assert not logged.of(7)
    new.write_text('{"values": {"loss": 1}}\n')
    assert logged.of(7) == {"loss": 1.0}


def send(endpoint: Endpoint, content: bytes) -> bytes:
    host, port = endpoint._server.server_address[:2]
    with socket.create_connection((host, port), timeout=30) as connection:
        with suppress(OSError):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(OSError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer


GARBAGE = (
    b"", b"\n\n", b"\x00" * 1000, os.urandom(5000), b"GET", b"GET /metrics",
    b"GET " + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx", b"DELETE / HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n", b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip


def test_garbage_does_no_harm(endpoint, tmp_path, capfd):
    endpoint.start(Collector(lambda: SIGNS, None, tmp_path))
    for content in GARBAGE:
        assert b"weft_steps" not in send(endpoint, content)[:2000] or content == b"GET /metrics"
    assert len(told(endpoint)) == 5
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(endpoint.address.replace("metrics", "other"), timeout=30)
    assert capfd.readouterr() == ("", "")


def test_many_that_say_nothing_are_turned_away(endpoint, tmp_path):
    endpoint.start(Collector(lambda: SIGNS, None, tmp_path))
    address = endpoint._server.server_address[:2]
    silent = [socket.create_connection(address, timeout=30) for _ in range(40)]
    assert sum("process_request_thread" in thread.name for thread in threading.enumerate()) <= 8
    for connection in silent:
        connection.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(OSError):
            if len(told(endpoint)) == 5:
                return
    pytest.fail("nobody is answered any more")


def test_only_this_host_is_answered(endpoint):
    assert endpoint._server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_told_before_anything_runs(endpoint, tmp_path, capsys):
    port = endpoint._server.server_address[1]
    with pytest.raises(
        LaunchError, match=f"--metrics-port {port} cannot be listened at: .*; name another one"
    ):
        Endpoint(port)
    script = tmp_path / "x.py"
    script.write_text("open('ran', 'w')")
    assert main(["run", "--metrics-port", str(port), str(script)]) == 2
    assert "cannot be listened at" in capsys.readouterr().err and not Path("ran").exists()


def test_mpirun_has_no_launcher_that_could_answer(tmp_path, capsys):
    (tmp_path / "x.py").write_text("")
    assert main(["run", "--metrics-port", "0", "--engine", "mpirun", str(tmp_path / "x.py")]) == 2
    assert (
        "--metrics-port is for ranks on this machine or by ssh, and not for mpirun" in capsys.readouterr().err
    )


JOB = """
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 4, "verify": "off"})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))

@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

while True:
    loss = train_step(model, torch.randn(8, 32))
    weft.log({"loss": loss, "tokens": 4096})
"""


def test_a_job_that_runs(tmp_path):
    options = [
        "--quiet",
        "--metrics-port",
        "0",
        "--log-dir",
        str(tmp_path),
        "--record",
        str(tmp_path / "out"),
    ]
    wanted = {
        'weft_steps_total{rank="1"}', 'weft_step_seconds{rank="0"}', 'weft_idle_ratio{rank="1"}',
        'weft_memory_bytes{rank="1"}', 'weft_value{name="tokens",rank="0"}',
    }  # fmt: skip
    with started(2, JOB, options=options) as job:
        assert job.process.stderr is not None
        line = ""
        while "metrics are at" not in line:
            line = job.process.stderr.readline()
        address = re.search(r"http://\S+", line)
        assert address is not None
        found: dict[str, float] = {}
        deadline = time.monotonic() + 150
        while not wanted <= found.keys() and time.monotonic() < deadline:
            with urllib.request.urlopen(address[0], timeout=30) as answer:
                text = answer.read().decode()
            pairs = [each.rpartition(" ") for each in text.splitlines() if not each.startswith("#")]
            found = {name: float(value) for name, _, value in pairs}
            time.sleep(0.2)
    assert wanted <= found.keys()
    assert found['weft_value{name="tokens",rank="0"}'] == 4096
    assert 0 <= found['weft_idle_ratio{rank="1"}'] <= 1 and found['weft_step_seconds{rank="0"}'] > 0
