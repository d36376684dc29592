"""Jobs that Kubernetes has, against a server on the loopback interface: submitted, followed, blamed, stopped."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="kubernetes is not installed: pip install 'weft[kubernetes]'")

from tests.kube import NAMESPACE, Kube, container, environ_of, kube, status
from weft.cli.main import main
from weft.errors import JobError, LaunchError
from weft.launch import Job
from weft.launch.started import kubernetes
from weft.launch.started.kubernetes import KubernetesHandle

JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
SETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kube, dict[str, str]]]:
    monkeypatch.setattr(kubernetes, "TICK_S", 0.02)
    with kube(tmp_path) as found:
        yield found


def job(**more: Any) -> Job:
    return Job("train.py", **{"engine": "kubernetes", "image": "a/b:1", "hosts": 2, **more})


def start(environ: dict[str, str], **more: Any) -> KubernetesHandle:
    handle = job(**more).start(environ)
    assert isinstance(handle, KubernetesHandle)
    return handle


@pytest.mark.parametrize(
    ("form", "path", "end"), [("trainjob", JOBS, "Complete"), ("jobset", SETS, "Completed")]
)
def test_a_job_that_ends_well(cluster, form: str, path: str, end: str):
    fake, environ = cluster
    environ["HF_TOKEN"] = "0123456"
    handle = start({**environ, "OTHER": "stays"}, form=form, hand_on=["HF_TOKEN"], ranks_per_host=2)
    made = fake.objects[f"{path}/train"]
    assert ("POST", path, {"fieldValidation": "Strict"}) in fake.asked
    text = json.dumps(made)
    assert (
        "0123456" not in text and "stays" not in text and '"PYTHONUNBUFFERED"' in text and "--tee=3" in text
    )
    secret = fake.objects[f"/api/v1/namespaces/{NAMESPACE}/secrets/train-secrets"]
    assert {*secret["stringData"]} == {"HF_TOKEN", "WEFT_TOKEN"} and secret["stringData"][
        "HF_TOKEN"
    ] == "0123456"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert handle.poll() is None and handle.state == "no pods yet" and handle.logs(3) == ""
    fake.pod(0, phase="Running")
    name = fake.pod(
        1, phase="Pending", containerStatuses=[container(waiting={"reason": "ContainerCreating"})]
    )
    assert handle.poll() is None and handle.logs(3) == ""
    assert handle.state == f"1 of 2 pods run: host 1 (pod {name} on machine1) waits: ContainerCreating"
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    fake.logs[name] = (
        "2026-01-01T00:00:01Z [default0]:two\n2026-01-01T00:00:01Z [default1]:three \udcff\n"  # no UTF-8
    )
    fake.end(0, 0)
    fake.end(1, 0)
    fake.condition(end)
    assert handle.wait(30) == 0 and handle.stop() == 0
    assert (handle.logs(2), handle.logs(3)) == ("two\n", "three \ufffd\n")
    with pytest.raises(LaunchError, match="there is no rank 4: the job has 4"):
        handle.logs(4)


def test_the_error_names_the_host_that_failed_first(cluster):
    fake, environ = cluster
    handle = start(environ)
    name = fake.end(1, 137, "OOMKilled", second=5)
    fake.end(0, 1, second=7)
    fake.condition("Failed", reason="BackoffLimitExceeded", message="job train-node-0 failed")
    with pytest.raises(JobError) as told:
        handle.wait(30)
    assert (told.value.code, told.value.rank) == (137, 1)
    assert str(told.value) == (
        f"host 1 (pod {name} on machine1), rank 1, ended with exit code 137: OOMKilled, more memory than its limit\n"
        "the TrainJob train in the namespace team failed: BackoffLimitExceeded: job train-node-0 failed"
    )


def test_weft_s_own_line_comes_first(cluster):
    fake, environ = cluster
    handle = start(environ, ranks_per_host=2)
    fake.end(0, 143, second=1)
    name = fake.end(1, 1, second=2)
    fake.logs[name] = (
        "2026-01-01T00:00:01Z [default1]:weft: rank 3 on x (pid 7) failed in step 2: ValueError: boom\n"
    )
    fake.condition("Failed")
    with pytest.raises(
        JobError, match=r"^weft: rank 3 on x .*boom\nhost 1 .*, ranks 2 to 3, ended with"
    ) as told:
        handle.wait(30)
    assert (told.value.code, told.value.rank) == (1, 3)


def test_only_the_last_start_is_blamed(cluster):
    fake, environ = cluster
    handle = start(environ, form="jobset", max_restarts=1)
    first = fake.end(0, 3, second=1)
    assert handle.poll() is None
    del fake.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/{first}"]  # by the JobSet, which starts all again
    fake.pod(1, attempt=1, phase="Failed", containerStatuses=[container(terminated={"exitCode": 5})])
    fake.condition("Failed", reason="ReachedMaxRestarts")
    with pytest.raises(JobError, match=r"^host 1 .* ended with exit code 5\n.*ReachedMaxRestarts"):
        handle.wait(30)


def test_a_failure_that_no_pod_tells(cluster):
    fake, environ = cluster
    handle = start(environ)
    fake.condition("Failed", reason="DeadlineExceeded")
    with pytest.raises(JobError, match="the TrainJob train in the namespace team failed: DeadlineExceeded"):
        handle.wait(30)


@pytest.mark.parametrize("finalized", [True, False])
def test_stop_deletes_the_job_and_what_it_made(cluster, finalized: bool):
    fake, environ = cluster
    fake.finalized = finalized  # else pods stay until they are ended
    handle = start(environ)
    fake.pod(0, phase="Running")
    assert handle.stop(save_s=0.05) == 143
    assert fake.objects == {}
    deleted = [(path, query) for method, path, query in fake.asked if method == "DELETE"]
    assert deleted[0] == (f"{JOBS}/train", {"propagationPolicy": "Foreground"})
    if not finalized:
        assert deleted[1][1] == {"gracePeriodSeconds": "0"}


def test_somebody_else_deletes_the_job(cluster):
    fake, environ = cluster
    handle = start(environ)
    del fake.objects[f"{JOBS}/train"]
    with pytest.raises(
        JobError, match="the TrainJob train in the namespace team is gone: somebody has deleted"
    ):
        handle.wait(30)


def test_a_pod_that_cannot_start(cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubernetes, "STUCK_S", 0.05)
    fake, environ = cluster
    handle = start(environ)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image a/b:1"}
    fake.pod(0, phase="Pending", containerStatuses=[container(waiting=waiting)])
    with pytest.raises(
        JobError, match=r"host 0 \(pod .*\) cannot start: ImagePullBackOff: no such image a/b:1"
    ):
        handle.wait(30)
    assert handle.stop(0) == 143


def test_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubernetes, "TICK_S", 0.02)
    monkeypatch.setattr(kubernetes, "AWAY_S", 0.2)
    with kube(tmp_path) as (fake, environ):
        handle = start(environ)
        fake.refusals["GET", "train"] = 503, status("etcd is away", "ServiceUnavailable")
        assert handle.poll() is None
        fake.refusals.clear()
        assert handle.poll() is None
    with pytest.raises(JobError, match="the Kubernetes server http.* does not answer: .* may still run"):
        handle.wait(30)


def test_nobody_is_there(tmp_path: Path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(
            LaunchError, match=r"the Kubernetes server http://127.0.0.1:\d+ does not answer: "
        ):
            start(environ_of(tmp_path, held.getsockname()[1]))
    with pytest.raises(
        LaunchError,
        match=r"where the Kubernetes cluster is cannot be read from /.*none \(.*\); KUBECONFIG names",
    ):
        start({"KUBECONFIG": str(tmp_path / "none")})


FORBIDDEN = status('trainjobs is forbidden: User "me" cannot create', "Forbidden")


@pytest.mark.parametrize(
    ("what", "refusal", "text"),
    [
        (
            "trainjobs",
            (403, FORBIDDEN),
            "cannot create; kubectl auth can-i create trainjobs.trainer.kubeflow.org -n team",
        ),
        (
            "trainjobs",
            (401, status("Unauthorized", "Unauthorized")),
            "does not know who asks: Unauthorized; kubectl auth",
        ),
        (
            "trainjobs",
            (404, "404 page not found\n"),
            "the cluster has no TrainJob: kubectl apply --server-side -k ",
        ),
        (
            "trainjobs",
            (404, status('namespaces "team" not found', "NotFound", kind="namespaces")),
            'Kubernetes does not find it: namespaces "team" not found; kubectl get namespaces',
        ),
        (
            "trainjobs",
            (422, status("spec is wrong", "Invalid")),
            r"refuses to create train \(422\): spec is wrong",
        ),
        ("trainjobs", (500, "<html>"), r"Kubernetes could not answer \(500\): "),
        ("secrets", (403, FORBIDDEN), "refuses to create train-secrets: .* can-i create secrets -n team"),
    ],
)
def test_refusals_leave_nothing_behind(cluster, what: str, refusal: tuple[int, Any], text: str):
    fake, environ = cluster
    fake.refusals["POST", what] = refusal
    with pytest.raises(LaunchError, match=text):
        start(environ)
    assert fake.objects == {}


def test_a_jobset_without_its_controller(cluster):
    fake, environ = cluster
    fake.refusals["POST", "jobsets"] = 404, "404 page not found\n"
    with pytest.raises(LaunchError, match="the cluster has no JobSet: .*/jobset/releases/.* installs JobSet"):
        start(environ, form="jobset")


def test_a_name_that_is_taken(cluster):
    fake, environ = cluster
    start(environ)
    with pytest.raises(
        LaunchError, match="there is trainjobs/train already.*kubectl delete trainjobs train -n team"
    ):
        start(environ)
    assert f"{JOBS}/train" in fake.objects


@pytest.fixture
def followed(cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`weft run`; what a test does each time the job has been looked at, one step after the other."""
    fake, environ = cluster
    monkeypatch.setenv("KUBECONFIG", environ["KUBECONFIG"])
    monkeypatch.chdir(tmp_path)

    def run(*steps: Callable[[], object], options: Sequence[str] = ()) -> int:
        left, ask = [*steps], KubernetesHandle._ask

        def asked(handle: KubernetesHandle) -> None:
            ask(handle)
            if left:
                left.pop(0)()

        monkeypatch.setattr(KubernetesHandle, "_ask", asked)
        return main(["run", "--engine", "kubernetes", "--image", "a/b:1", *options, "train.py"])

    return fake, run


def test_weft_run_follows_the_job(followed, capsys: pytest.CaptureFixture[str]):
    fake, run = followed
    log = {"train-node-0-0-x": "2026-01-01T00:00:01Z one\n"}
    more = {
        "train-node-0-0-x": log["train-node-0-0-x"]
        + "2026-01-01T00:00:01.5Z two\n2026-01-01T00:00:02Z three\n"
    }
    steps = [
        lambda: fake.pod(0, phase="Running"),
        lambda: fake.logs.update(log),
        lambda: fake.logs.update(more),
        lambda: (fake.end(0, 0), fake.condition("Complete")),
    ]
    assert run(*steps) == 0
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert captured.err.splitlines() == [
        "weft: created train in the namespace team; Ctrl-C deletes it",
        "weft: no pods yet",
        "weft: 1 of 1 pods run",
        "weft: ended with exit code 0",
    ]
    assert f"{JOBS}/train" in fake.objects


def test_weft_run_ends_with_the_job_s_code(followed, capsys: pytest.CaptureFixture[str]):
    fake, run = followed
    assert run(lambda: (fake.end(0, 7), fake.condition("Failed"))) == 7
    assert (
        "weft: host 0 (pod train-node-0-0-x on machine0), rank 0, ended with exit code 7\n"
        in capsys.readouterr().err
    )


def test_a_signal_deletes_the_job(followed, capsys: pytest.CaptureFixture[str]):
    fake, run = followed
    assert run(lambda: signal.raise_signal(signal.SIGTERM)) == 143
    assert "weft: SIGTERM: deletes train\n" in capsys.readouterr().err and fake.objects == {}


def test_a_job_that_is_long_in_going(followed, monkeypatch, capsys: pytest.CaptureFixture[str]):
    fake, run = followed
    monkeypatch.setattr("weft.launch.started.handle.END_S", 0.05)
    monkeypatch.setattr(KubernetesHandle, "_end", lambda handle, save_s: None)
    assert run(lambda: signal.raise_signal(signal.SIGINT)) == 130
    assert "weft: SIGINT: deletes train\nweft: train is still being deleted\n" in capsys.readouterr().err


def test_nobody_reads_the_output(followed, monkeypatch):
    fake, run = followed
    monkeypatch.setattr("weft.cli.followed._print", lambda line: (_ for _ in ()).throw(BrokenPipeError))
    name = "train-node-0-0-x"
    with suppress(BrokenPipeError):
        assert (
            run(lambda: (fake.pod(0, phase="Running"), fake.logs.update({name: "2026-01-01T00:00:01Z a\n"})))
            != 0
        )
    assert fake.objects == {}


def test_without_the_package_the_plan_is_printed(followed, monkeypatch, capsys: pytest.CaptureFixture[str]):
    fake, run = followed
    monkeypatch.setattr("weft.cli.followed.is_installed", lambda: False)
    assert run(options=["-x", "MY_TOKEN=0123456"]) == 2
    captured = capsys.readouterr()
    assert '"kind": "TrainJob"' in captured.out and "0123456" not in captured.out
    assert "nothing was started, as the package kubernetes is not installed: pip install" in captured.err
    assert fake.asked == []


def polls(fake: Kube) -> int:
    """How often the job itself was asked for."""
    return sum(method == "GET" and path == f"{JOBS}/train" for method, path, _ in list(fake.asked))


def test_a_server_that_tells_of_changes_is_asked_after_these_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kubernetes, "TICK_S", 0.01)
    with kube(tmp_path) as (fake, environ):
        fake.watches = True
        handle = start(environ)
        with pytest.raises(TimeoutError):
            handle.wait(2)
        assert handle._watched is not None and handle._watched.streaming
        told = {path.rpartition("/")[2]: query for method, path, query in fake.asked if method == "WATCH"}
        assert told["trainjobs"]["fieldSelector"] == "metadata.name=train"
        assert told["pods"]["labelSelector"] == "jobset.sigs.k8s.io/jobset-name=train"
        before = polls(fake)
        with pytest.raises(TimeoutError):
            handle.wait(1)
        assert polls(fake) - before <= 1  # what was told last
        fake.pod(0, phase="Running")
        deadline = time.monotonic() + 30
        while handle.state != "1 of 2 pods run" and time.monotonic() < deadline:
            with suppress(TimeoutError):
                handle.wait(0.1)
        assert handle.state == "1 of 2 pods run"
        fake.end(0, 0)
        fake.end(1, 3)
        fake.condition("Failed", reason="Failed", message="a pod failed")
        with pytest.raises(JobError, match="host 1"):
            handle.wait(30)
        assert polls(fake) < 20


def test_where_watching_is_refused_it_is_asked(cluster):
    """The third refusal in a row is the last one; the job's end is noticed all the same."""
    fake, environ = cluster
    handle = start(environ)
    with pytest.raises(TimeoutError):
        handle.wait(0.5)
    assert polls(fake) > 2 and handle._watched is not None and not handle._watched.streaming
    fake.end(0, 0)
    fake.condition("Complete")
    assert handle.wait(30) == 0
