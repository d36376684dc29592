"""How each kind of thing is read, and whether what was read is right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft.torch as weft
from tests.fuzz_files.samples import COMMANDS, MESSAGE, Trained
from weft.analysis.analysis import Analysis
from weft.check import check_script
from weft.cli.main import main
from weft.communication.messages import pack, unpack
from weft.compat.debugger import read_job
from weft.compat.distribution import read as read_distribution
from weft.compat.enable import launch_environ
from weft.compat.modelparallel.parameters import read as read_parameters
from weft.config import resolve
from weft.errors import WeftError
from weft.launch.discovery import discover
from weft.profiler.foreign_traces import read_traces
from weft.profiler.live.following import Follower
from weft.profiler.reading import read_recording, read_run
from weft.untrusted import read_text


class FaultError(Exception):
    """An outcome that must not be."""


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        name: Its folder among the samples.
        changed: Which files are changed, as patterns.
        use: Reads it in a child of its own, and says "right", "read" (where nobody can tell) or "other".
        seal: Makes checksums fit again after the change.
        pipes: Whether a file may become a pipe: what a command reads may be one.
    """

    name: str
    changed: tuple[str, ...]
    use: Callable[[Path, Trained], str]
    seal: Callable[[Path], None] | None = None
    pipes: bool = True
    folder: str = ""

    @property
    def sample(self) -> str:
        return self.folder or self.name


def resumed(made: Trained, path: Path, judged: bool, optimizer: bool, **how: Any) -> str:
    """Resume from a path. Refused, nothing may have changed; taken, all must be as it was saved.

    ``optimizer``: the optimizer's states are there, too, and with ``also`` in ``how`` everything else.
    """
    before = made.now()
    kinds = ("model/", *(["optimizer/"] if optimizer else ()), *(["also/"] if "also" in how else ()))
    try:
        user = weft.resume_from_checkpoint(path, model=made.model, random_states=judged, **how)
    except WeftError:
        if changed := unlike(made.now(), before):
            raise FaultError(f"it was refused, but {changed} changed") from None
        raise
    if not judged:
        return "read"
    expected = {name: value for name, value in made.saved.items() if name.startswith(kinds)}
    wrong = unlike({name: value for name, value in made.now().items() if name in expected}, expected)
    if wrong:
        raise FaultError(f"it was taken, but {wrong} is not what was saved")
    if user is not None and how.get("tag", "a") == "a" and user not in (made.user, {"a": 1}):
        raise FaultError(f"it was taken, but the user's content is {user!r:.200}")
    return "right"


def older(folder: Path, made: Trained) -> str:
    """A save of older scripts, which may have no optimizer."""
    there = (folder / "a_partial" / "optimizer_0_0.pt").exists()
    return resumed(made, folder, True, there, tag="a")


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """The first name whose values differ, NaN being equal to itself."""
    if one.keys() != other.keys():
        return ", ".join(sorted(one.keys() ^ other.keys()))
    return next((name for name in one if not same(one[name], other[name])), "")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        torch.nan_to_num(one.double()), torch.nan_to_num(other.double())
    )


def reseal(folder: Path) -> None:
    """``DONE`` fits the changed index."""
    save = folder / "a_partial"
    with contextlib.suppress(OSError):
        if (save / "index.json").is_symlink() or (save / "index.json").is_fifo():
            return
        content = (save / "index.json").read_bytes()
        done = {"index_bytes": len(content), "index_sha256": hashlib.sha256(content).hexdigest()}
        (save / "DONE").write_text(json.dumps(done))


def archived(folder: Path) -> None:
    """The changed parts of a file of ``torch.save`` as a file again, with checksums that fit."""
    with zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.name != "model.pt":
                archive.write(path, str(path.relative_to(folder)))


def message(folder: Path, made: Trained) -> str:
    """The text of an object that another rank has sent, beside its bytes."""
    text = (folder / "message.json").read_bytes().decode(errors="replace")
    unpack(text, pack(MESSAGE).blobs, torch.device("cpu"))
    return "read"


def command(arguments: list[str], folder: Path) -> str:
    """A command in a folder: it works, or says in one line why not."""
    os.chdir(folder)
    with output(folder) as errors:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    if code == 0:
        return "read"
    told = [line for line in errors() if ": warning: " not in line]
    more = [line for line in told[1:] if not line.startswith("  ")]  # lists and drawings are indented
    if code != 2 or not told or more:
        raise FaultError(f"exit code {code}, and it says: {told}")
    raise WeftError(told[0])


@contextlib.contextmanager
def output(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """Standard output and errors go to files, as strict about characters as a terminal's."""
    streams = sys.stdout, sys.stderr
    with (
        open(folder / "stdout", "w", encoding="utf-8") as out,
        open(folder / "stderr", "w", encoding="utf-8", errors="backslashreplace") as errors,
    ):
        sys.stdout, sys.stderr = out, errors
        try:
            yield lambda: (folder / "stderr").read_text(errors="replace").strip("\n").split("\n")
        finally:
            sys.stdout, sys.stderr = streams


def environment(folder: Path) -> dict[str, str]:
    try:
        lines = os.fsdecode((folder / "environment").read_bytes().replace(b"\0", b"")).split("\n")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if line.partition("=")[0] and "=" in line)


def checked_script(folder: Path, made: Trained) -> str:
    check_script(folder / "train.py")
    return "read"


def settings_of(folder: Path, made: Trained) -> str:
    resolve({"partitions": 2}, {"WEFT_CONFIG": str(folder / "settings.json")}, 4)
    return "read"


def job_of(folder: Path, made: Trained) -> str:
    read_job(read_text(folder / "job.json"))
    return "read"


def distribution_of(folder: Path, made: Trained) -> str:
    read_distribution(str(folder / "distribution.json")).settings()
    return "read"


def hosts_of(folder: Path, made: Trained) -> str:
    (folder / "x.py").touch()
    return command(["run", "--engine", "ssh", "--hostfile", "hosts", "--dry-run", "x.py"], folder)


def ran(folder: Path, made: Trained) -> str:
    return command(["status", "."], folder)


def launchers(folder: Path, made: Trained) -> str:
    discover(environment(folder))
    return "read"


def options(folder: Path, made: Trained) -> str:
    import warnings

    environ = environment(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (
            lambda: resolve(None, environ, 4),
            lambda: read_parameters({}, environ),
            lambda: launch_environ(environ, ["--mp_parameters", environ.get("SM_HP_MP_PARAMETERS", "")], 2),
        ):
            try:
                read()
            except WeftError as error:
                refused = error
            else:
                refused = None
    if refused is not None:
        raise refused
    return "read"


def arguments_of(folder: Path) -> list[str]:
    try:
        lines = os.fsdecode((folder / "arguments").read_bytes().replace(b"\0", b"")).split("\n")
    except OSError:
        return []
    return [line for line in lines if not takes_long(line)]


def takes_long(text: str) -> bool:
    """Whether a number asks for a simulation that takes long for good reasons: not small, and not refused either."""
    return text.isascii() and text.isdigit() and len(text) <= 7 and 64 < int(text) <= 1_000_000


def recording(folder: Path, made: Trained) -> str:
    Follower(folder / "recording").look()
    read_recording(folder / "recording")
    return command(["draw", "recording", "--out", "x.html"], folder)


def live(folder: Path, made: Trained) -> str:
    return command(["top", "run", "--once"], folder)


def traces(folder: Path, made: Trained) -> str:
    read_traces(folder / "traces")
    return "read"


def run_of(folder: Path, made: Trained) -> str:
    analysis = Analysis(read_run(folder / "run"))
    assert analysis.step_s >= 0 and analysis.waits is not None
    return "read"


def on_graph(name: str) -> Callable[[Path, Trained], str]:
    def use(folder: Path, made: Trained) -> str:
        return command(["simulate", name, "--partitions", "2", "--schedule", "gpipe"], folder)

    return use


def planned(cluster: str, config: str) -> Callable[[Path, Trained], str]:
    def use(folder: Path, made: Trained) -> str:
        model = (
            ["--config", config]
            if config
            else "--layers 2 --hidden 64 --heads 4 --vocab 100 --seq 32".split()
        )
        return command(["plan", "--cluster", cluster, *model, "--global-batch", "64"], folder)

    return use


def on_schedule(folder: Path, made: Trained) -> str:
    graph = folder.parent / "valid" / "graph.json"
    return command(
        ["simulate", str(graph), "--partitions", "2", "--schedule", "file", "--csv", "schedule.csv"], folder
    )


TARGETS: tuple[Target, ...] = (
    Target("own", ("a_partial/*", "newest"), lambda at, made: resumed(made, at, True, True, also=made.also)),
    Target("sizes", ("a_partial/*",), lambda at, made: resumed(made, at, True, True, verify="sizes", also=made.also),
           folder="own"),
    Target("model", ("a_partial/*",), lambda at, made: read_model(at, made), folder="own"),
    Target(
        "resealed", ("a_partial/index.json",), lambda at, made: resumed(made, at, False, True, also=made.also), reseal,
        folder="own",
    ),
    Target("full", ("*",), lambda at, made: resumed(made, at, True, False, tag="a", partial=False)),
    Target("older", ("a_partial/*",), older),
    Target("torch", ("*",), lambda at, made: resumed(made, at / "model.pt", True, False, partial=False)),
    Target("archive", ("*/data.pkl", "*/data.pkl", "*/*", "*/data/*"),
           lambda at, made: resumed(made, at / "model.pt", False, False, partial=False), archived, pipes=False),
    Target("message", ("*",), message, pipes=False),
    Target("legacy", ("*",), lambda at, made: resumed(made, at / "model.pt", False, False, partial=False)),
    Target(
        "safetensors", ("*",), lambda at, made: resumed(made, at / "model.safetensors", False, False, partial=False)
    ),
    Target("summed", ("*",), lambda at, made: resumed(made, at / "model.safetensors", True, False, partial=False)),
    Target("summed folder", ("model/*",), lambda at, made: resumed(made, at / "model", True, False, partial=False)),
    Target("huggingface", ("*",), lambda at, made: resumed(made, at, False, False, partial=False)),
    Target("distributed", ("model/*", "model/.metadata", "model/.metadata"),
           lambda at, made: resumed(made, at / "model", True, False, partial=False)),
    Target("recording", ("recording/*",), recording),
    Target("live", ("run/*",), live, folder="run"),
    Target("traces", ("traces/*",), traces),
    Target("run", ("run/*",), run_of),
    Target("graph", ("*",), on_graph("graph.json"), pipes=False),
    Target("profile", ("*",), on_graph("profile.txt"), pipes=False),
    Target("timeline", ("*",), lambda at, made: command(["draw", "timeline.json", "--out", "x.svg"], at), pipes=False),
    Target("schedule", ("*",), on_schedule, pipes=False),
    Target("machine", ("*",), planned("2xmachine.json", ""), pipes=False),
    Target("config", ("*",), planned("8xH100", "config.json"), pipes=False),
    Target("settings", ("*",), settings_of, pipes=False),
    Target("debugger", ("*",), job_of, pipes=False),
    Target("script", ("*",), checked_script, pipes=False),
    Target("distribution", ("*",), distribution_of, pipes=False),
    Target("hosts", ("*",), hosts_of, pipes=False),
    Target("ran", ("*",), ran),
    Target("slurm", ("*",), launchers, pipes=False),
    Target("torchrun", ("*",), launchers, pipes=False),
    Target("options", ("*",), options, pipes=False),
    *(
        Target(f"command{number}", ("arguments",), lambda at, made: command(arguments_of(at), at), pipes=False)
        for number in range(len(COMMANDS))
    ),
)  # fmt: skip


def read_model(folder: Path, made: Trained) -> str:
    found = weft.read_model(folder)
    expected = {name: value for name, value in made.saved.items() if name.startswith("model/")}
    wrong = unlike({f"model/{name}": value for name, value in found.items()}, expected)
    if wrong:
        raise FaultError(f"read_model gives another {wrong}")
    return "right"
