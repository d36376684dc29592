"""What `weft doctor` finds, of this host and of others behind a stand-in for ssh."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.errors import FormatError
from weft.launch.doctor import remote, stream
from weft.launch.doctor.advice import of_host, of_hosts
from weft.launch.doctor.facts import Facts
from weft.launch.doctor.remote import Answer, Speed

GOOD = Facts(
    name="node1", address="10.0.0.1", interfaces=(("eth0", "10.0.0.1"),), listens=True, python="3.12.1", torch="2.13.0",
    version="1.0", clock_s=1e9, shared_bytes=8 << 30, open_files=65536, cores=8, gpus=("H100", "H100"),
)  # fmt: skip


def test_a_good_host_has_no_warning():
    found = [*of_host("node1", GOOD, alone=False)]
    assert all(each.well for each in found)
    assert "ok       node1: GPUs: 2 x H100" in map(str, found)


def test_of_several_networks_one_may_have_to_be_chosen():
    two = replace(GOOD, interfaces=(("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")))
    told = [str(each) for each in of_host("node1", two, alone=False)]
    assert any("eth0 10.0.0.1, ib0 10.1.0.1" in line and "NCCL_SOCKET_IFNAME=eth0" in line for line in told)


WRONG = {
    "leads nowhere": ({"address": ""}, "name: node1 leads nowhere; add a line for it to /etc/hosts on node1"),
    "a name of the loopback": (
        {"address": "127.0.1.1"},
        "node1 is 127.0.1.1; .* write 10.0.0.1 into /etc/hosts",
    ),
    "no network": ({"interfaces": ()}, "network: no address but the loopback's; other hosts cannot reach it"),
    "no ports": ({"listens": False}, "ports: no process may listen; allow it"),
    "no PyTorch": ({"torch": ""}, r"no PyTorch, weft 1.0; pip install 'weft\[torch\]'"),
    "GPUs for nothing": ({"torch": "2.13.0+cpu"}, "GPUs: 2 x H100; this PyTorch was built without CUDA"),
    "little shared memory": ({"shared_bytes": 64 << 20}, "/dev/shm: 0.1 GiB; .* --shm-size=8g"),
    "few files": ({"open_files": 1024}, "open files: 1024; ulimit -n 65536"),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_fault_has_a_remedy(what: str):
    changed, told = WRONG[what]
    (bad,) = [each for each in of_host("node1", replace(GOOD, **changed), alone=False) if not each.well]
    assert str(bad).startswith("warning  node1: ") and re.search(told, str(bad)), str(bad)


def test_a_host_without_a_limit_of_open_files_is_well():
    found = [*of_host("node1", replace(GOOD, open_files=-1), alone=False)]
    assert all(each.well for each in found)
    assert "ok       node1: open files: no limit" in map(str, found)


def test_hosts_that_differ_and_links_that_are_slow_or_closed():
    other = replace(GOOD, name="node2", torch="2.12.0", gpus=("H100",))
    answers = [
        Answer("node1", GOOD),
        Answer("node2", other, ahead_s=-40.0),
        Answer("node3", problem="Permission denied"),
    ]
    speeds = [Speed("node2", "node1", 2e7), Speed("node1", "node2", problem="10.0.0.2:4000: refused")]
    told = [str(each).removeprefix("warning  ") for each in of_hosts(answers, speeds) if not each.well]
    assert told == [
        "node2: clock: 40.0 s behind; run chrony or ntpd: logs and timelines of hosts would not fit together",
        "node3: ssh: Permission denied; ssh node3 true must work without a question, and Python must be at the "
        "same path there",
        "all: torch: they differ: 2.13.0 on node1, 2.12.0 on node2; install the same on all",
        "all: GPUs: they differ: 2 on node1, 1 on node2; all hosts get equally many ranks: those of the smallest",
        "node2 to node1: network: 20 MB/s; keep a pipeline on one host, and compress gradients: docs/reduction.md",
        "node1 to node2: network: 10.0.0.2:4000: refused; open the ports of node2 to node1",
    ]


def test_facts_are_read_as_they_were_printed():
    assert Facts.from_json(GOOD.to_json()) == GOOD
    here = Facts.here()
    assert Facts.from_json(here.to_json()) == here
    with pytest.raises(FormatError, match="this is not JSON"):
        Facts.from_json("hello")
    with pytest.raises(FormatError, match=r"facts.cores: expected a whole number"):
        Facts.from_json(GOOD.to_json().replace('"cores": 8', '"cores": "8"'))


def test_only_who_knows_the_secret_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "SECONDS", 0.05)
    taker = [sys.executable, "-m", stream.__name__, "take"]
    with subprocess.Popen(taker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taking:
        assert taking.stdin and taking.stdout
        taking.stdin.write("good\n")
        taking.stdin.flush()
        port = int(taking.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"bad".ljust(32) + b"x" * 100)
        stream.send("127.0.0.1", port, "good")
        assert float(taking.communicate(timeout=60)[0]) > 1e6


SSH = f"""#!{sys.executable}
import subprocess, sys
words = sys.argv[1:]
assert "BatchMode=yes" in words and "StrictHostKeyChecking=yes" in words
host, command = words[words.index("--") + 1 :]
if host == "closed":
    sys.exit("ssh: connect to host closed port 22: Connection refused")
sys.exit(subprocess.call(["sh", "-c", command]))
"""


def test_hosts_are_asked_through_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["doctor", "--hosts", "one,two,closed", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["host"] for each in found} >= {"one", "two", "closed", "two to one"}
    (closed,) = [each for each in found if each["host"] == "closed"]
    assert closed["text"] == "ssh: connect to host closed port 22: Connection refused" and not closed["well"]
    (speed,) = [each for each in found if each["host"] == "two to one"]
    assert speed["text"].endswith(" MB/s"), speed


def test_a_host_that_takes_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(remote, "SECONDS", 0.2)
    problem = remote.measure("one", "two", "127.0.0.1").problem
    assert problem == "two named no port: nothing can listen there, or it is too busy to answer"


@pytest.mark.parametrize("hosts", ["-oProxyCommand=x", "a b", "", "one,one"])
def test_hosts_that_are_none(hosts: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", f"--hosts={hosts}"]) == 2
    assert "weft doctor: error: --hosts" in capsys.readouterr().err


def test_no_framework_is_imported_for_facts():
    line = "import sys, weft.launch.doctor.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], timeout=60).returncode == 0


def test_this_host(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) in (0, 1)
    assert "this host: versions: Python 3." in capsys.readouterr().out
