"""A job that SkyPilot has: ``sky launch`` runs as long as the job does, and what it prints is kept in a file."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from weft.errors import JobError, LaunchError
from weft.launch.engines.described import Described
from weft.launch.engines.plan import Plan
from weft.launch.journal.job_status import END_S
from weft.launch.started.handle import ProcessHandle, text_of
from weft.launch.started.pods import headline, of_rank
from weft.untrusted import shown_path, translated

INSTALL = "pip install 'skypilot[...]', with the clouds that are used"
CANCELLED = 103
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MARK = re.compile(r"^\([^()]*?(?:, rank=(\d+))?, pid=\d+(?:, ip=[^()]*)?\) ?")
_NUMBER = re.compile(r"Job submitted, ID: (\d+)|^Job ID: (\d+)", re.MULTILINE)
_CODES = re.compile(r"failed with return code list:.*")


def by_host(text: str) -> Iterator[tuple[int, str]]:
    """The lines that hosts wrote, each with its host's number.

    >>> list(by_host("Launching\\n(head, rank=0, pid=7) a\\n(worker1, rank=1, pid=8, ip=10.0.0.2) b\\n"))
    [(0, 'a\\n'), (1, 'b\\n')]
    """
    for line in _COLOURS.sub("", text).splitlines(keepends=True):
        if found := _MARK.match(line):
            yield int(found[1] or 0), line[found.end() :]


class SkyHandle(ProcessHandle):
    """See the module. What the job runs on stays after it: ``sky down NAME`` ends the cluster and its cost.

    Attributes:
        output: The file with all that ``sky`` prints.
    """

    def __init__(self, job: Described, plan: Plan, environ: Mapping[str, str]) -> None:
        (command,) = plan.commands
        program = shutil.which(command.arguments[0], path=environ.get("PATH"))
        if program is None:
            raise LaunchError(f"there is no command sky: {INSTALL}")
        self._program, self._environ = program, environ
        self.output = Path(job.folder, job.log_dir, f"{job.name}-sky.log")
        with translated(f'"{shown_path(self.output)}" cannot be written', LaunchError):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            for file in plan.files:
                Path(job.folder, file.path).write_text(file.text, encoding="utf-8")
            with self.output.open("wb") as output:
                process = subprocess.Popen(
                    [program, *command.arguments[1:]], cwd=job.folder, env={**environ, **command.environ},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
        super().__init__(job, process)

    def logs(self, rank: int = 0) -> str:
        """The output of a rank; empty before it has started.

        Raises:
            LaunchError: There is no such rank, or the file of the output cannot be read.
        """
        self._check_rank(rank)
        host, local = divmod(rank, self.job.ranks_per_host)
        log = "".join(line for number, line in by_host(text_of(self.output)) if number == host)
        return of_rank(log, local)

    def _end(self, save_s: float) -> None:
        found = _NUMBER.search(_COLOURS.sub("", text_of(self.output)))
        if found:
            with translated("sky cannot be started", LaunchError), suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [self._program, "cancel", "--yes", self.job.name, found[1] or found[2]],
                    cwd=self.job.folder, env=dict(self._environ), stdin=subprocess.DEVNULL,
                    capture_output=True, check=False, timeout=max(save_s, END_S),
                )  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
                return
        self.process.send_signal(signal.SIGINT)
        super()._end(END_S)

    def _error(self, code: int) -> JobError:
        text = text_of(self.output)
        first, rank = headline("".join(line for _, line in by_host(text)))
        codes = _CODES.search(_COLOURS.sub("", text))
        parts = [first, f"the job {self.job.name} ended with exit code {code} of sky launch"]
        parts += [f"SkyPilot: {codes[0]}"] if codes else []
        return JobError("\n".join([*filter(None, parts), f"see {self.output}"]), code, rank)
