"""A job that Kubernetes has: what is asked of it, when something has changed or once a second, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from weft.errors import JobError, WeftError
from weft.launch.engines.described import Described
from weft.launch.engines.kubernetes import secret_name
from weft.launch.engines.plan import Plan, is_secret
from weft.launch.started.cluster import Cluster, Record, Unreachable
from weft.launch.started.handle import Handle
from weft.launch.started.pods import Pod, blamed, first_failed, joined, newer, of_rank
from weft.launch.started.watched import Watched

TICK_S = 1.0
AWAY_S = 60.0
"""How long the server may be silent before the handle gives up; the job goes on."""
STUCK_S = 180.0
"""How long a pod may wait for an image or a Secret."""
_STOPPED = 143
_TAIL = 400
_OVERLAP_S = 15
"""Logs are read twice over so many seconds; a line's time says whether it is a new one."""


class KubernetesHandle(Handle):
    """A ``TrainJob`` or ``JobSet`` that was created, and its pods.

    Attributes:
        cluster: Where it is.
        ended: Whether it has come to its end, well or not.
    """

    def __init__(self, job: Described, plan: Plan, environ: Mapping[str, str]) -> None:
        super().__init__(job)
        manifest: Record = json.loads(plan.files[0].text)
        self.cluster = Cluster(manifest["kind"], manifest["apiVersion"], environ)
        self._where = f"{manifest['kind']} {job.name} in the namespace {self.cluster.namespace}"
        self._uid = self.cluster.create(manifest)
        try:
            secrets = {name: text for name, text in plan.environ.items() if is_secret(name)}
            if secrets:
                self.cluster.create_secret(secret_name(job), secrets, job.name, self._uid)
        except BaseException:
            with suppress(WeftError):
                self.cluster.delete(job.name)
            raise
        self._code: int | None = None
        self._reason = ""
        self._failed: dict[str, Pod] = {}
        self._pods: list[Pod] = []
        self._answered = time.monotonic()
        self._stuck_since: float | None = None
        self._last, self._read = "", 0.0
        self._watched: Watched | None = None

    @property
    def ended(self) -> bool:
        """True if the job has come to its end."""
        return self._code is not None

    @property
    def state(self) -> str:
        """Where the job stood when it was looked at last, in a few words."""
        if self._code is not None:
            return f"ended with exit code {self._code}"
        waiting = [pod for pod in self._pods if pod.phase == "Pending"]
        if not self._pods:
            return "no pods yet"
        why = next((f": {pod} waits: {pod.waits}" for pod in waiting if pod.waits), "")
        running = sum(pod.phase == "Running" for pod in self._pods)
        return f"{running} of {self.job.host_count} pods run{why}"

    def poll(self) -> int | None:
        """The exit code; None while the job waits or runs, or Kubernetes does not answer.

        Raises:
            JobError: Somebody has deleted the job, a pod cannot start, or the server is silent for a minute.
        """
        if self._code is None:
            try:
                self._ask()
                self._answered = time.monotonic()
            except Unreachable as error:
                if time.monotonic() - self._answered > AWAY_S:
                    raise JobError(f"{error}. The {self._where} may still run", 1) from error
        return self._code

    def logs(self, rank: int = 0) -> str:
        """The output of a rank since its pod was started; empty before, and after the pod is gone.

        Raises:
            LaunchError: There is no such rank, or Kubernetes refuses.
        """
        self._check_rank(rank)
        host, local = divmod(rank, self.job.ranks_per_host)
        pods = [pod for pod in self.cluster.pods(self.job.name) if pod.host == host][-1:]
        log = "".join(map(self.cluster.log, pods))
        return of_rank(log, local)

    def follow(
        self, out: Callable[[str], None], say: Callable[[str], None], heard: Callable[[], bool]
    ) -> int | None:
        """Hands what the pod of rank 0 writes to ``out``, line by line, and where the job stands to ``say``.

        Gives the exit code when the job has ended, or None as soon as ``heard`` does.

        Raises:
            JobError: As ``wait`` does.
        """
        said = ""
        while not heard():
            code = self._poll_if_due()
            with suppress(Unreachable):
                for line in self._news():
                    out(line)
            if self.state != said:
                said = self.state
                say(said)
            if code is not None:
                return self.wait()
            self._await_news()
        return None

    def _poll_if_due(self) -> int | None:
        """As ``poll``, but where Kubernetes sends changes it is asked after these only."""
        if self._watched is None:
            name = self.job.name
            self._watched = Watched(
                [lambda: self.cluster.changes_of_job(name), lambda: self.cluster.changes_of_pods(name)]
            )
        code = self.poll() if self._watched.due() else self._code
        if code is not None:
            self._watched.close()
        return code

    def _await_news(self) -> None:
        assert self._watched is not None
        self._watched.wait(TICK_S)

    def _news(self) -> list[str]:
        found: list[str] = []
        for pod in [pod for pod in self._pods if pod.host == 0]:
            now = time.monotonic()
            since = {"since_seconds": int(now - self._read) + _OVERLAP_S} if self._last else {}
            lines, self._last = newer(self.cluster.log(pod, timestamps=True, **since), self._last)
            self._read = now
            found += lines
        return found

    def _ask(self) -> None:
        found = self.cluster.find(self.job.name)
        if found is None or found["metadata"].get("uid") != self._uid:
            if not self._stopped:
                raise JobError(f"the {self._where} is gone: somebody has deleted it", 1)
            self._code = _STOPPED
            return
        self._pods = self.cluster.pods(self.job.name)
        self._failed.update({pod.name: pod for pod in self._pods if pod.ended and pod.ended.code})
        newest = max((pod.attempt for pod in [*self._pods, *self._failed.values()]), default=0)
        self._failed = {name: pod for name, pod in self._failed.items() if pod.attempt == newest}
        for each in (found.get("status") or {}).get("conditions") or []:
            if each.get("status") != "True":
                continue
            if each.get("type") in ("Complete", "Completed"):
                self._code = 0
            elif each.get("type") == "Failed":
                self._reason = joined(each)
                culprit = first_failed(self._failed.values())
                self._code = culprit.ended.code if culprit is not None and culprit.ended else 1
        if self._code is None and not self._stopped:
            self._look_for_stuck()

    def _look_for_stuck(self) -> None:
        stuck = next((pod for pod in self._pods if pod.stuck), None)
        if stuck is None:
            self._stuck_since = None
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if time.monotonic() - self._stuck_since > STUCK_S:
            raise JobError(f"{stuck} cannot start: {stuck.waits}", 1)

    def _look(self) -> int | None:
        code = self._poll_if_due()
        if code is None:
            self._await_news()
        return code

    def _error(self, code: int) -> JobError:
        culprit = first_failed(self._failed.values())
        ending = f"the {self._where} failed{f': {self._reason}' if self._reason else ''}"
        if culprit is None:
            return JobError(ending, code)
        log = ""
        with suppress(WeftError):
            log = self.cluster.log(culprit, tail_lines=_TAIL)
        text, rank = blamed(culprit, self.job.ranks_per_host, log)
        return JobError(f"{text}\n{ending}", code, rank)

    def _end(self, save_s: float) -> None:
        self.cluster.delete(self.job.name)
        deadline = time.monotonic() + save_s
        while pods := self.cluster.pods(self.job.name):
            if time.monotonic() >= deadline:
                for pod in pods:
                    self.cluster.kill(pod)
                return
            time.sleep(min(TICK_S, max(0.0, deadline - time.monotonic())))
