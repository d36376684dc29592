"""`weft run` for other engines: what it plans, what it starts, and what it refuses."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from weft.cli import engines, run
from weft.cli.main import main
from weft.errors import LaunchError


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("WEFT_CONFIG", "WEFT_SET", "WEFT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return "train.py"


class Replaced(Exception):
    """This process would have become another program."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """The programs that this process would have become; all are installed."""
    found: list[tuple[str, list[str], dict[str, str]]] = []

    def replace(*call):
        found.append(call)
        raise Replaced

    monkeypatch.setattr(engines.os, "execve", replace)
    monkeypatch.setattr(engines.shutil, "which", lambda name: f"/usr/bin/{Path(name).name}")
    return found


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("local", "on this host, 2 times:"),
        ("mpirun", "mpirun -np 2 "),
        ("torchrun", "-m torch.distributed.run --standalone --nproc-per-node=2 train.py --lr 1"),
        ("ssh", "-o BatchMode=yes -o StrictHostKeyChecking=yes "),
        ("slurm", "#SBATCH --ntasks-per-node=2"),
        ("ray", "TorchTrainer("),
        ("kubernetes", '"kind": "TrainJob"'),
        ("skypilot", '"num_nodes": 1'),
    ],
)
def test_a_plan_is_printed_and_nothing_is_started(engine, text, script, replaced, capsys):
    options = ["--engine", engine, "-n", "2", "--image", "registry/train:1", "--dry-run"]
    assert (
        main(["run", *options, "-x", "MY_TOKEN=0123456", "--set", "partitions=2", script, "--lr", "1"]) == 0
    )
    printed = capsys.readouterr().out
    assert f"engine: {engine}\n" in printed and text in printed
    assert "MY_TOKEN=***" in printed and "0123456" not in printed
    assert "WEFT_SET='{\"partitions\": 2}'" in printed
    assert replaced == [] and [path.name for path in Path().iterdir()] == [script]


def test_slurm_gets_a_script(script, replaced):
    options = ["--engine", "slurm", "--hosts", "2", "-n", "8", "--time", "2h", "-x", "HF_TOKEN=0123456"]
    with pytest.raises(Replaced):
        main(["run", *options, script])
    ((path, arguments, environ),) = replaced
    assert path == "/usr/bin/sbatch" and arguments == ["sbatch", "--parsable", "train.sbatch"]
    assert environ["HF_TOKEN"] == "0123456"
    text = Path("train.sbatch").read_text()
    assert "--nodes=2\n" in text and "--ntasks-per-node=4\n" in text and "--time=0-02:00:00\n" in text
    assert "0123456" not in text and f"--export=ALL {sys.executable} train.py" in text


def test_torchrun_on_one_host(script, replaced):
    with pytest.raises(Replaced):
        main(["run", "--engine", "torchrun", "--nproc-per-node", "4", "-m", "package.train", "-x"])
    ((_, arguments, _),) = replaced
    assert arguments[1:] == [
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "package.train", "-x"]
    ]


def test_mpirun_on_hosts(script, replaced):
    options = ["--engine", "mpirun", "--hosts", "a:2,b:2", "--form", "openmpi5", "--mpi-options=--tag-output"]
    with pytest.raises(Replaced):
        main(["run", *options, script])
    ((path, arguments, environ),) = replaced
    assert path == "/usr/bin/mpirun" and arguments[:3] == ["mpirun", "-np", "4"]
    assert ["--host", "a:2,b:2"] == arguments[arguments.index("--host") :][:2] and "--tag-output" in arguments
    assert len(environ["WEFT_TOKEN"]) == 32 and not any(environ["WEFT_TOKEN"] in part for part in arguments)


@pytest.mark.parametrize("engine", ["slurm", "mpirun"])
def test_the_page_of_a_job_that_others_start_is_written_by_hand(engine, script, capsys):
    assert main(["run", "--engine", engine, "--report", "out", "--dry-run", script]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "weft run: the page is kept up to date only for ranks on this machine or by ssh: write it by weft report "
        "out --html\n"
    )


def test_settings_of_a_file_travel_as_text(script, capsys):
    Path("job.json").write_text('{"microbatches": 8}')
    main(["run", "--engine", "ray", "--config", "job.json", "--dry-run", script])
    assert "WEFT_CONFIG='{\"microbatches\": 8}'" in capsys.readouterr().out


def test_hosts_of_a_file(script, capsys):
    Path("hosts").write_text("# all\nnode1 slots=2\n\nnode2 slots=2  # the other\n")
    assert main(["run", "--engine", "torchrun", "--hostfile", "hosts", "--dry-run", script]) == 0
    printed = capsys.readouterr().out
    assert "on node1:" in printed and "on node2:" in printed and "--nproc-per-node=2" in printed


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[run.Job]:
    started: list[run.Job] = []
    monkeypatch.setattr(run.restarts, "run", lambda job: started.append(job) or 0)
    return started


DISTRIBUTION = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
    "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x NCCL_DEBUG='a b' --verbose"},
}


def test_a_distribution_runs_on_this_machine(jobs, script):
    assert main(["run", "--distribution", json.dumps(DISTRIBUTION), script]) == 0
    (job,) = jobs
    assert job.ranks == 2 and job.environ["NCCL_DEBUG"] == "a b"
    assert json.loads(job.environ["WEFT_CONFIG"]) == {"partitions": 2}
    assert json.loads(job.environ["SM_HP_MP_PARAMETERS"]) == {"partitions": 2}
    assert json.loads(job.environ["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_num_of_processes_per_host"] == 2


def test_a_distribution_chooses_the_engine_of_several_hosts(script, capsys):
    main(["run", "--distribution", json.dumps(DISTRIBUTION), "--hosts", "a,b", "--dry-run", script])
    printed = capsys.readouterr().out
    assert "mpirun -np 4 " in printed and "--host a:2,b:2" in printed and " --verbose " in printed


def test_options_win_over_a_distribution(jobs, script):
    main(["run", "-n", "4", "--set", "partitions=4", "--distribution", json.dumps(DISTRIBUTION), script])
    assert jobs[0].ranks == 4 and json.loads(jobs[0].environ["WEFT_SET"]) == {"partitions": 4}


def test_named_hosts_are_reached_by_ssh(jobs, script, monkeypatch):
    monkeypatch.setenv("WEFT_SSH_OPTIONS", "-F 'a file'")
    options = ["--hosts", "a:2,u@b:2", "-x", "MY_TOKEN=0123456", "--max-restarts", "3", "--prefix", "all"]
    assert main(["run", *options, script, "--lr", "1"]) == 0
    (job,) = jobs
    assert (job.ranks, job.restarts, job.prefix) == (4, 3, "all") and job.command[2:] == [script, "--lr", "1"]
    assert [host.name for host in job.hosts] == ["a", "u@b"]
    for host in job.hosts:
        assert host.command[:3] == ["ssh", "-F", "a file"] and host.command[-3:-1] == ["--", host.name]
        assert "0123456" not in " ".join(host.command)
    assert job.environ["MY_TOKEN"] == "0123456" and len(job.environ["WEFT_TOKEN"]) == 32
    assert "HOME" not in job.environ


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--engine", "torchrun", "--hosts", "a,b"], "torchrun starts the ranks of one host: --dry-run"),
        (["--hosts", "2"], "the engine local has one host: leave hosts out"),
        (["--name", "a"], "--hosts, --name and --form are for other engines: add --engine"),
        (["--engine", "slurm", "--hosts", "2", "-n", "3"], "-n is 3, which 2 hosts cannot share evenly"),
        (["--engine", "slurm", "--hosts", "0", "-n", "2"], "--hosts is 0: it must be at least 1"),
        (
            ["--gpus-per-host", "2"],
            "gpus_per_host is 2: ranks of the engine local take the GPUs that they see",
        ),
        (["--engine", "mpirun", "--gpus-per-host", "2"], "ranks of the engine mpirun take the GPUs"),
        (
            ["-n", "4", "--ranks-per-host", "2"],
            "each host has 2 by --ranks-per-host and 4 by -n: leave all but one",
        ),
        (["--engine", "ssh", "--hosts", "a:2,b:4"], "--hosts gives hosts different numbers of ranks"),
        (["--engine", "ssh", "--hosts", "a:x"], "--hosts has 'a:x': write a name, or a name and a number"),
        (["--engine", "ssh", "--hosts", "a", "--hostfile", "b"], "--hosts and --hostfile both name hosts"),
        (["--engine", "slurm", "--time", "soon"], "--time is 'soon': write 2h, 1h30m or 02:00:00"),
        (["--engine", "slurm", "--time", "5s"], "--time is '5s': give a minute at least, for example 2h"),
        (["--report", "train.py"], "--report train.py: this is a file, name a folder"),
        (["--log-dir", "train.py"], "--log-dir train.py: this is a file, name a folder"),
        (["--config", "{"], "--config is not JSON"),
        (["--time", "2h"], "time_limit is 2:00:00: the engine local has none; leave it out"),
        (
            ["--engine", "slurm", "--prefix", "all"],
            "--prefix is for ranks on this machine, and not for slurm",
        ),
        (
            ["--engine", "slurm", "--metrics-port", "0"],
            "--metrics-port is for ranks on this machine or by ssh, and not for slurm",
        ),
        (["--ssh-options=-v"], "--ssh-options is for ssh: name the hosts with --hosts, or leave it out"),
        (["--hosts", "a,b", "--ssh-options=-F 'x"], "--ssh-options cannot be read: No closing quotation"),
        (
            ["--hosts", "2", "--engine", "slurm", "--fail-on", "any", "--record", "out"],
            "--fail-on is for ranks on this machine or by ssh, and not for slurm",
        ),
        (["--engine", "slurm", "--mpi-options=-H a"], "--mpi-options is for mpirun"),
        (["--engine", "kubernetes", "--dry-run"], "the engine kubernetes runs an image: give one"),
        (["--engine", "skypilot", "--smdistributed"], "--smdistributed is not for skypilot"),
        (["--ranks-per-host", "0"], "--ranks-per-host is 0: it must be at least 1"),
        (
            ["--config", "{}", "--distribution", json.dumps(DISTRIBUTION)],
            "--config and the parameters of --distribution are both settings",
        ),
        (
            ["-n", "3", "--distribution", json.dumps(DISTRIBUTION)],
            "3 processes cannot be divided into pipelines of 2",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments, text, jobs, script, capsys):
    assert main(["run", *arguments, script]) == 2
    assert text in capsys.readouterr().err
    assert jobs == []


@pytest.mark.parametrize("options", [["--dry-run"], ["--engine", "slurm"]])
def test_verify_starts_its_jobs_here(options, jobs, script, capsys):
    assert main(["verify", *options, script]) == 2
    assert "on this machine: leave out --engine and --dry-run" in capsys.readouterr().err and jobs == []


def test_an_engine_that_is_not_installed(script, monkeypatch, capsys):
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    assert main(["run", "--engine", "slurm", script]) == 2
    assert "sbatch is not installed: --dry-run prints what is to be run" in capsys.readouterr().err
    assert not Path("train.sbatch").exists()


def test_without_sky_the_plan_is_printed(script, monkeypatch, capsys):
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    assert main(["run", "--engine", "skypilot", "-x", "MY_TOKEN=0123456", script]) == 2
    captured = capsys.readouterr()
    assert '"num_nodes": 1' in captured.out and "0123456" not in captured.out
    assert "nothing was started, as there is no command sky: pip install 'skypilot" in captured.err
    assert not Path("train-task.yaml").exists()


def test_sky_gets_a_task(script, replaced):
    with pytest.raises(Replaced):
        main(["run", "--engine", "skypilot", "--hosts", "2", "-x", "HF_TOKEN=0123456", script])
    ((path, arguments, environ),) = replaced
    assert path == "/usr/bin/sky" and arguments == [
        *["sky", "launch", "--yes", "--cluster=train", "--secret", "HF_TOKEN", "--secret", "WEFT_TOKEN"],
        "train-task.yaml",
    ]
    assert environ["HF_TOKEN"] == "0123456" and "0123456" not in Path("train-task.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("2d", 172800), ("100:00:00", 360000)]
)
def test_spans_of_time(text: str, seconds: int):
    assert engines.span(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "90", "2h ", "h", "1:2:3", "2x", "-1h", "9" * 5000 + "h"])
def test_no_spans_of_time(text: str):
    with pytest.raises(LaunchError, match="--time is "):
        engines.span(text)
