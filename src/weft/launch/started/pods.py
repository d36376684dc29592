"""The pods of a job: where each stands, which one failed first, and what one rank wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.untrusted import whole

NODE = "jobset.sigs.k8s.io/replicatedjob-name"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINERS = ("train", "node")
"""What the container of the ranks is called: by weft's JobSet, and by Kubeflow's runtimes."""
_STUCK = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull", "ImageInspectError",
    "ImagePullBackOff", "InvalidImageName",
)  # fmt: skip
_KILLED = (137, 143)
_WEFT = re.compile(r"^(?:\[\w+\]:)?(weft: rank (\d+) on .+)$", re.MULTILINE)
_LOCAL = re.compile(r"\[default(\d+)\]:")


@dataclass(frozen=True)
class Ended:
    """The end of a pod's container: its exit code, why if Kubernetes says so, and when."""

    code: int
    reason: str = ""
    time: str = ""


@dataclass(frozen=True)
class Pod:
    """One host of a job.

    Attributes:
        host: Its number, which is that of torchrun's node.
        container: Where its ranks run.
        phase: ``Pending``, ``Running``, ``Succeeded`` or ``Failed``.
        node: The machine that has it; empty before one does.
        waits: Why it has not started yet.
        attempt: How often the JobSet had been started again before.
    """

    name: str
    host: int
    container: str
    phase: str
    node: str = ""
    waits: str = ""
    ended: Ended | None = None
    attempt: int = 0

    @property
    def stuck(self) -> bool:
        """True if it waits for something that rarely comes by itself: an image, a Secret."""
        return self.waits.startswith(_STUCK)

    def __str__(self) -> str:
        """
        >>> print(Pod("train-node-0-1-x7", 1, "train", "Running", "gke-7"))
        host 1 (pod train-node-0-1-x7 on gke-7)
        """
        return f"host {self.host} (pod {self.name}{f' on {self.node}' if self.node else ''})"


def pod_of(record: Mapping[str, Any]) -> Pod | None:
    """The pod that Kubernetes describes; None if it has no ranks."""
    about, spec, status = (record.get(part) or {} for part in ("metadata", "spec", "status"))
    labels = {**(about.get("annotations") or {}), **(about.get("labels") or {})}
    index, attempt = whole(str(labels.get(INDEX, "0"))), whole(str(labels.get(ATTEMPT, "0")))
    if labels.get(NODE, "node") != "node" or index is None or attempt is None:
        return None
    names = [str(each.get("name")) for each in spec.get("containers") or [{}]]
    container = next((name for name in names if name in CONTAINERS), names[0])
    containers = status.get("containerStatuses") or []
    mine: Mapping[str, Any] = next((each for each in containers if each.get("name") == container), {})
    state = mine.get("state") or {}
    end = state.get("terminated") or (mine.get("lastState") or {}).get("terminated")
    ended = None if end is None else _ended(end)
    phase = str(status.get("phase") or "Pending")
    if ended is None and phase == "Failed":
        ended = Ended(1, joined(status), str(about.get("deletionTimestamp") or ""))
    waits = joined(state["waiting"]) if state.get("waiting") else ""
    if not waits and phase == "Pending":
        found = [each for each in status.get("conditions") or [] if each.get("status") == "False"]
        waits = next((joined(each) for each in found if each.get("type") == "PodScheduled"), "")
    node = str(spec.get("nodeName") or "")
    return Pod(str(about.get("name")), index, container, phase, node, waits, ended, attempt)


def first_failed(pods: Iterable[Pod]) -> Pod | None:
    """The pod to blame: the first that failed by itself. Those that were killed may have been so because of it."""

    def rank(pod: Pod) -> tuple[bool, str, int]:
        assert pod.ended is not None
        killed = pod.ended.code in _KILLED and pod.ended.reason in ("", "Error")
        return killed, pod.ended.time or "~", pod.host

    return min((pod for pod in pods if pod.ended is not None and pod.ended.code), key=rank, default=None)


def blamed(pod: Pod, ranks_per_host: int, log: str = "") -> tuple[str, int | None]:
    """The text about a pod that failed, and the rank if that is known. Weft's own first line says most.

    >>> blamed(Pod("a-node-0-1", 1, "train", "Failed", "gke-7", "", Ended(137, "OOMKilled")), 4)[0]
    'host 1 (pod a-node-0-1 on gke-7), ranks 4 to 7, ended with exit code 137: OOMKilled, more memory than its limit'
    """
    assert pod.ended is not None
    first = pod.host * ranks_per_host
    who = f"rank {first}" if ranks_per_host == 1 else f"ranks {first} to {first + ranks_per_host - 1}"
    reason = pod.ended.reason if pod.ended.reason != "Error" else ""
    if reason == "OOMKilled":
        reason += ", more memory than its limit"
    text = f"{pod}, {who}, ended with exit code {pod.ended.code}{f': {reason}' if reason else ''}"
    line, rank = headline(log)
    if line:
        return f"{line}\n{text}", rank
    return text, first if ranks_per_host == 1 else None


def headline(log: str) -> tuple[str, int | None]:
    """Weft's own first line about a failure, and the rank that it names; an empty text if there is none.

    >>> headline("[default1]:weft: rank 3 on node7 (pid 9) failed in step 2: ValueError: boom\\n")
    ('weft: rank 3 on node7 (pid 9) failed in step 2: ValueError: boom', 3)
    """
    found = _WEFT.search(log)
    return (found[1], int(found[2])) if found else ("", None)


def of_rank(log: str, local: int) -> str:
    """The output of one rank of a pod, if torchrun has marked the lines of each; else all that the pod wrote.

    >>> of_rank("[default0]:a\\n[default1]:b\\nof torchrun\\n", 1), of_rank("a\\n", 0)
    ('b\\n', 'a\\n')
    """
    lines = [(_LOCAL.match(line), line) for line in log.splitlines(keepends=True)]
    if not any(found for found, _ in lines):
        return log
    return "".join(line[found.end() :] for found, line in lines if found and int(found[1]) == local)


def newer(log: str, last: str) -> tuple[list[str], str]:
    """The lines of a log with times that are later than ``last``, without their times, and the last time.

    >>> newer("2026-01-01T00:00:01.5Z a\\n2026-01-01T00:00:02.5Z b c\\n", "2026-01-01T00:00:01.5Z")
    (['b c'], '2026-01-01T00:00:02.5Z')
    """
    parted = [line.partition(" ") for line in log.splitlines()]
    found = [(time, text) for time, _, text in parted if _moment(time) > _moment(last)]
    return [text for _, text in found], found[-1][0] if found else last


def _moment(time: str) -> tuple[str, str]:
    """A time by which texts are sorted: fractions have no fixed number of digits."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return whole, fraction.ljust(9, "0")


def _ended(end: Mapping[str, Any]) -> Ended:
    code = end.get("exitCode")
    return Ended(
        code if isinstance(code, int) else 1, str(end.get("reason") or ""), str(end.get("finishedAt") or "")
    )


def joined(condition: Mapping[str, Any]) -> str:
    """The reason and the message of a condition or state."""
    return ": ".join(str(condition[part]) for part in ("reason", "message") if condition.get(part))
