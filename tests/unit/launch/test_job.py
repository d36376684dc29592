"""A job as a value: what is refused when it is made, and what a plan shows of secrets."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from datetime import timedelta
from typing import Any

import pytest

from weft.errors import LaunchError
from weft.launch.engines.described import FORMS
from weft.launch.engines.plan import MASK
from weft.launch.engines.ssh import STRICT
from weft.launch.job import Job
from weft.launch.remote.agent import FILE

IMAGE = {"kubernetes": {"image": "registry/train:1"}}
HOSTS = {"local": 1}
AWKWARD = ["a b", "it's", "$(touch /tmp/x)", "`id`", "new\nline", "", "--", "*", "\\", '"']


def job_of(engine: str, **more: Any) -> Job:
    return Job(
        "train.py", engine=engine, hosts=HOSTS.get(engine, ["a", "b"]), **IMAGE.get(engine, {}), **more
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"script": 3}, "script is 3: give a text"),
        ({"arguments": "--lr 1"}, "arguments is '--lr 1': give a list of texts"),
        ({"arguments": ["--lr", 1]}, "arguments is .'--lr', 1.: give a list of texts"),
        ({"variables": ["A"]}, "variables is .'A'.: give a dict"),
        ({"settings": {1: 2}}, "settings has names that are no texts"),
        ({"variables": {"A": 1}}, "1 can be no argument and no variable"),
        ({"engine": "pbs"}, "engine is 'pbs': it is one of local, ssh, torchrun"),
        ({"engine": "mpirun", "form": "lam"}, "form is 'lam': mpirun has openmpi4, openmpi5, mpich"),
        ({"form": "lam"}, "form is 'lam': local has no forms, leave it out"),
        ({"script": "-c"}, "script is '-c': give a file, or a module"),
        ({"script": ""}, "script is '': give a file, or a module"),
        ({"script": "a\nb.py"}, r"script is 'a\\nb.py': it has a line break"),
        ({"name": "My Job"}, "name is 'My Job': write small letters"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0: write a whole number of at least 1"),
        ({"ranks_per_host": True}, "ranks_per_host is True: write a whole number"),
        ({"gpus_per_host": -1}, "gpus_per_host is -1: write a whole number of at least 0"),
        ({"gpus_per_host": 2, "engine": "ssh"}, "gpus_per_host is 2: ranks of the engine ssh take the GPUs"),
        ({"gpus_per_host": 2, "engine": "skypilot"}, "gpus_per_host is 2: SkyPilot wants their kind, too"),
        ({"gpu_kind": "A100"}, "gpu_kind is 'A100': it is for the engine skypilot, with gpus_per_host"),
        (
            {"gpu_kind": "A 1", "gpus_per_host": 2, "engine": "skypilot"},
            "gpu_kind is 'A 1': write the name of an accelerator",
        ),
        ({"time_limit": timedelta(seconds=5)}, "time_limit is 0:00:05: give a minute at least"),
        (
            {"max_restarts": 2, "engine": "mpirun"},
            "max_restarts is 2: the engine mpirun starts nothing again",
        ),
        ({"hosts": 2}, "the engine local has one host: leave hosts out"),
        ({"hosts": "a,b"}, "hosts is 'a,b': write how many, or a list of names"),
        ({"hosts": 0, "engine": "slurm"}, "hosts is 0: write how many"),
        ({"hosts": [], "engine": "slurm"}, "hosts is empty: name one at least"),
        ({"hosts": ["-oProxyCommand=x"], "engine": "ssh"}, "'-oProxyCommand=x' is no name of a host"),
        ({"hosts": ["a", "a"], "engine": "ssh"}, "hosts has a name twice: a, a"),
        ({"hosts": 2, "engine": "ssh"}, "hosts is 2: the engine ssh needs their names"),
        ({"hosts": 2, "engine": "mpirun", "form": "mpich"}, "hosts is 2: MPICH needs their names"),
        ({"variables": {"A-B": "1"}}, "'A-B' is no name of a variable"),
        ({"hand_on": ["A B"]}, "'A B' is no name of a variable"),
        ({"arguments": ["a\0b"]}, "can be no argument and no variable"),
        ({"engine": "kubernetes"}, "the engine kubernetes runs an image: give one"),
        ({"settings": {"partitions": 3}, "ranks_per_host": 2}, "settings of the job: .*3"),
        ({"settings": {"partition": 2}}, "settings of the job: .*partition"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str):
    with pytest.raises(LaunchError, match=text):
        Job(**{"script": "train.py", **given})


def test_all_faults_are_told_at_once():
    with pytest.raises(LaunchError, match=r"name is 'X': .*; ranks_per_host is 0: "):
        Job("train.py", name="X", ranks_per_host=0)


@pytest.mark.parametrize(
    ("script", "module", "name"),
    [("runs/Train_GPT 2.py", False, "train-gpt"), ("package.fit", True, "fit"), ("77.py", False, "job-")],
)
def test_a_name_is_made_of_the_scripts(script: str, module: bool, name: str):
    found = Job(script, module=module).name
    assert found.startswith(name) and re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", found)


@pytest.mark.parametrize("engine", FORMS)
def test_a_secret_is_never_shown_and_never_in_a_file(engine: str):
    secret, told = "hf_secret/'0123", ["0123 it's", "$4567'", '"8989']
    arguments = ["--api-key", told[0], f"wandb.key={told[1]}", f"--note=the key is {told[0]}"]
    job = job_of(
        engine, hand_on=["HF_TOKEN"], arguments=arguments, variables={"NOTE": json.dumps(told)},
        mpi_options=["-x", f"MY_SECRET={told[2]}"],
    )  # fmt: skip
    plan = job.plan({"HF_TOKEN": secret, "WEFT_TOKEN": "f00d" * 8})
    assert plan.environ["HF_TOKEN"] == secret
    for text in (str(plan), repr(plan), repr(job)):
        assert not any(part in text for part in (secret, "f00df00d", "0123", "4567", "8989"))
    assert f"HF_TOKEN={MASK}" in str(plan)
    for name in ("--api-key", "wandb.key", "MY_SECRET"):
        assert f"note: {name} is an argument, which others can read" in str(plan)
    assert not any(secret in file.text for file in plan.files)
    assert not any(secret in argument for command in plan.commands for argument in command.arguments)


@pytest.mark.parametrize("engine", FORMS)
def test_only_named_variables_travel(engine: str):
    plan = job_of(engine, hand_on=["A"], settings={"microbatches": 2}).plan({"A": "1", "B": "2"})
    assert {*plan.environ} - {"WEFT_TOKEN", "WEFT_LEADER"} == {"A", "WEFT_SET"}
    assert json.loads(plan.environ["WEFT_SET"]) == {"microbatches": 2}


def test_a_variable_that_is_not_set():
    with pytest.raises(LaunchError, match="are to be handed on and are not set: NONE_SUCH"):
        Job("train.py", hand_on=["NONE_SUCH"]).plan({})


def test_a_secret_of_several_lines():
    with pytest.raises(LaunchError, match="SSH_KEY has several lines"):
        job_of("kubernetes", variables={"SSH_KEY": "a\nb"}).plan({})


def test_every_job_over_hosts_has_a_secret_of_its_own():
    first, second = (job_of("torchrun").plan({}).environ["WEFT_TOKEN"] for _ in range(2))
    assert first != second and len(first) == 32
    given = job_of("torchrun").plan({"WEFT_TOKEN": "given"})
    assert given.environ["WEFT_TOKEN"] == "given" and "was made" not in str(given)
    assert "note: WEFT_TOKEN was made for this plan: to start by hand, set one" in str(
        job_of("torchrun").plan({})
    )


def test_a_shell_reads_the_batch_script_as_it_was_meant(tmp_path):
    """The script really runs, with programs called srun and python that write down what they are given."""
    for name in ("srun", "python"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$NOTE"\n')
        (tmp_path / name).chmod(0o755)
    plan = Job("train it.py", AWKWARD, engine="slurm", variables={"NOTE": "\n".join(AWKWARD)}).plan({})
    done = subprocess.run(
        ["/bin/bash", "-c", plan.files[0].text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = done.stdout.split("\0")[:-1]
    assert found[found.index("python") + 1 :] == ["train it.py", *AWKWARD, "\n".join(AWKWARD)]


def test_a_remote_shell_reads_the_command_as_it_was_meant(tmp_path):
    """The text for the remote shell really runs, with a Python that writes down what it is given."""
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$PYTHONPATH" "$PWD"\n')
    python.chmod(0o755)
    folder = tmp_path / "a folder'; $HOME"
    folder.mkdir()
    given: dict[str, Any] = {
        "engine": "ssh",
        "hosts": ["a"],
        "python": str(python),
        "ssh_options": ["-p", "1"],
    }
    variables = {"PYTHONPATH": "x y:$HOME", "HF_TOKEN": "hidden"}
    agent, rank = Job("train.py", AWKWARD, folder=str(folder), variables=variables, **given).plan({}).commands
    assert list(agent.arguments[:-1]) == ["ssh", "-p", "1", *STRICT, "--", "a"]
    assert agent.typed == ["HF_TOKEN", "PYTHONPATH"] and "hidden" not in agent.arguments[-1]
    assert list(rank.arguments[2:]) == ["train.py", *AWKWARD]
    run = ["/bin/sh", "-c", agent.arguments[-1]]
    done = subprocess.run(
        run, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\0")[:-1] == [FILE, "x y:$HOME", str(folder)]
    folder.rmdir()
    done = subprocess.run(run, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert done.returncode and "a folder" in done.stderr and not done.stdout


def expanded(text: str) -> str:
    """What Kubernetes makes of a command's word, or of a variable's value: `$$` is `$`, `$(NAME)` the value of NAME."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "EXPANDED", text)


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_kubernetes_reads_the_command_as_it_was_meant(form: str):
    awkward = [*AWKWARD, "$(HOME)", "$$(HOME)", "a$$b", "$", "$$$"]
    job = Job(
        "train.py", awkward, engine="kubernetes", form=form, image="train:1",
        variables={"NOTE": "$$(HOME) a$$b", "PRICE": "5$"},
    )  # fmt: skip
    spec = json.loads(job.plan({}).files[0].text)["spec"]
    if form == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    told = spec["trainer"] if form == "trainjob" else spec["containers"][0]
    command = [expanded(word) for word in told["command"]]
    assert command[command.index("train.py") + 1 :] == awkward
    values = {each["name"]: expanded(each["value"]) for each in told["env"] if "value" in each}
    assert values == {"NOTE": "$$(HOME) a$$b", "PRICE": "5$"}


def test_the_program_for_ray_is_python_and_holds_the_job():
    text = Job("train.py", AWKWARD, engine="ray", hosts=2, ranks_per_host=3).plan({}).files[0].text
    line = next(line for line in text.splitlines() if line.startswith("JOB = "))
    compile(text, "driver", "exec")
    told = json.loads(ast.literal_eval(line.removeprefix("JOB = json.loads(").removesuffix(")")))
    assert told["arguments"] == AWKWARD and told["ranks"] == 6
