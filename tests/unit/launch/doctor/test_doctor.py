"""What `weft doctor` finds, of this host and of others behind a stand-in for ssh."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.matrix.hosts import DEVICE, two_hosts, why_not
from weft.cli.main import main
from weft.errors import FormatError
from weft.launch.doctor import remote, stream
from weft.launch.doctor.advice import of_host, of_hosts
from weft.launch.doctor.facts import Facts
from weft.launch.doctor.remote import Answer, Link
from weft.launch.doctor.stream import Passed

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
    links = [
        Link("node2", "node1", Passed(bytes_per_s=2e7, packet_bytes=1500, mtu_bytes=1500)),
        Link("node1", "node2", problem="10.0.0.2: refused"),
    ]
    told = [str(each).removeprefix("warning  ") for each in of_hosts(answers, links) if not each.well]
    assert told == [
        "node2: clock: 40.0 s behind; run chrony or ntpd: logs and timelines of hosts would not fit together",
        "node3: ssh: Permission denied; ssh node3 true must work without a question, and Python must be at the "
        "same path there",
        "all: torch: they differ: 2.13.0 on node1, 2.12.0 on node2; install the same on all",
        "all: GPUs: they differ: 2 on node1, 1 on node2; all hosts get equally many ranks: those of the smallest",
        "node2 to node1: network: 20 MB/s; keep a pipeline on one host, and compress gradients: "
        "docs/data-parallel.md#algorithms-and-compression",
        "node1 to node2: network: 10.0.0.2: refused; open the ports of node2 to node1",
    ]


def told_of(passed: Passed) -> list[str]:
    return [str(each) for each in of_hosts([], [Link("node1", "node2", passed)])]


def test_what_does_not_pass_is_told():
    well = Passed(bytes_per_s=1e9, packet_bytes=8988, mtu_bytes=9000)
    assert told_of(well) == ["ok       node1 to node2: network: 1,000 MB/s"]
    assert told_of(replace(well, closed=((29500, "timed out"), (20007, "refused")))) == [
        "warning  node1 to node2: ports: no new connection to 29500 (timed out), 20007 (refused); open the ports of "
        "node2 to node1: a job uses 29500 (torchrun), 20000 to 39999 (mpirun, srun), and what the system gives",
        "ok       node1 to node2: network: 1,000 MB/s",
    ]
    between = "let what lies between take larger ones, or give both interfaces less: ip link set dev NAME mtu"
    assert told_of(replace(well, packet_bytes=576))[1:] == [
        f"warning  node1 to node2: packets: 576 bytes pass, and the interface of node1 sends 9000; {between} 576"
    ]
    assert told_of(Passed(packet_bytes=1500, mtu_bytes=1500)) == [
        "warning  node1 to node2: network: connections begin, but full packets (1500 bytes) do not arrive; "
        f"{between} what the path takes"
    ]
    assert len(told_of(Passed(((29500, "timed out"),)))) == 1


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
        ports = json.loads(taking.stdout.readline())
        assert [port in range(20000, 40000) for port in ports if port != 29500][:2] == [True, True]
        with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
            stranger.sendall(b"bad".ljust(32) + b"x" * 100)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        with socket.create_server(("127.0.0.1", 0)) as other:
            silent = other.getsockname()[1]
        passed = stream.send("127.0.0.1", [*ports, silent], "good")
        assert [port for port, _ in passed.closed] == [silent]
        assert "refused" in passed.closed[0][1] and passed.bytes_per_s > 1e6
        assert taking.wait(60) == 0


SSH = f"""#!{sys.executable}
import subprocess, sys
words = sys.argv[1:]
assert words[:2] == ["-F", "my config"], words
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
    given = ["--hosts", "one,two,closed", "--ssh-options=-F 'my config'"]
    assert main(["doctor", *given, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["host"] for each in found} >= {"one", "two", "closed", "two to one"}
    (closed,) = [each for each in found if each["host"] == "closed"]
    assert closed["text"] == "ssh: connect to host closed port 22: Connection refused" and not closed["well"]
    for pair in ("two to one", "one to two"):
        (speed,) = [each for each in found if each["host"] == pair]
        assert speed["text"].endswith(" MB/s"), speed
    assert main(["doctor", "--ssh-options=-v"]) == 2
    assert "--ssh-options is for ssh: name the hosts with --hosts" in capsys.readouterr().err
    monkeypatch.setenv("WEFT_SSH_OPTIONS", "'")
    assert main(["doctor", "--hosts", "one"]) == 2
    assert "WEFT_SSH_OPTIONS cannot be read" in capsys.readouterr().err


BLOCKED = {
    "connections one way": ("-p tcp --syn", "ports: no new connection to "),
    "a port of torchrun": ("-p tcp --dport 29500", r"ports: no new connection to 29500 \("),
    "large packets one way": (
        "-m length --length 577:65535",
        r"network: connections begin, but full packets \(1500 bytes\) do not arrive",
    ),
    "a small MTU": ("", "packets: 576 bytes pass, and the interface of [01] sends 1500"),
}
"""What the second host drops as it comes, and what is told of that."""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("what", BLOCKED)
def test_what_a_network_drops_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    dropped, told = BLOCKED[what]
    with two_hosts() as hosts:
        there = [*hosts.on(1, "iptables", "-w", "-A", "INPUT", *dropped.split(), "-j", "DROP")]
        if not dropped:
            there = ["ip", "-n", hosts.names[1], "link", "set", DEVICE, "mtu", "576"]
        subprocess.run(there, check=True, capture_output=True)
        ssh = tmp_path / "ssh"
        enter = f'["ip", "netns", "exec", {hosts.names}[int(host)], "sh", "-c", command]'
        ssh.write_text(
            SSH.replace('["sh", "-c", command]', enter).replace(
                'assert words[:2] == ["-F", "my config"], words', ""
            )
        )
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert main(["doctor", "--hosts", "0,1"]) == 1
    found = capsys.readouterr().out.splitlines()
    (line,) = [line for line in found if line.startswith("warning  0 to 1: ")]
    assert re.match(rf"warning  0 to 1: {told}", line), found
    back = [line for line in found if re.match(r"\w+ +1 to 0:", line)]
    assert back and all(line.startswith("ok") for line in back), found


def test_a_host_that_takes_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(remote, "SECONDS", 0.2)
    problem = remote.measure("one", "two", "127.0.0.1", []).problem
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
