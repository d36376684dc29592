"""A Kubernetes cluster, through the package ``kubernetes``: what is asked of it, and what its refusals mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.errors import LaunchError
from weft.launch.started.pods import Pod, pod_of
from weft.untrusted import parse_json, reason, shown_text, translated

Record = dict[str, Any]

INSTALL = "pip install 'weft[kubernetes]'"
_PLURALS = {"TrainJob": "trainjobs", "JobSet": "jobsets"}
_CONTROLLERS = {
    "TrainJob": "kubectl apply --server-side -k "
    "'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0', and the same with "
    "overlays/runtimes, install Kubeflow Trainer",
    "JobSet": "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml installs JobSet",
}
_TIMES_S = (5, 20)
"""How long a connection, and an answer, may take."""
_WATCH_S = 240
"""Seconds for which the server sends changes until it is asked again."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Unreachable(LaunchError):
    """The server gave no answer; the next one may come."""


def is_installed() -> bool:
    """True if the package is there."""
    return find_spec("kubernetes") is not None


class Cluster:
    """The cluster and the namespace that ``kubectl`` would use.

    Args:
        kind: ``TrainJob`` or ``JobSet``.
        environ: Where ``KUBECONFIG`` may name the file that says where the cluster is. Without such a file, and inside
            of a pod, it is the pod's own cluster.

    Raises:
        LaunchError: The package, or what says where the cluster is, is not there.
    """

    def __init__(self, kind: str, version: str, environ: Mapping[str, str]) -> None:
        if not is_installed():
            raise LaunchError(f"the package kubernetes is not installed: {INSTALL}")
        from kubernetes import client, config

        self.kind, self._plural = kind, _PLURALS[kind]
        self._group, _, self._version = version.partition("/")
        settings = client.Configuration()
        path = environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        with translated(
            f"where the Kubernetes cluster is cannot be read from {shown_text(path)}",
            LaunchError,
            "KUBECONFIG names the file; kubectl config view shows it",
        ):
            if not any(map(os.path.exists, path.split(os.pathsep))) and _NAMESPACE.exists():
                config.load_incluster_config(client_configuration=settings)
                self.namespace = _NAMESPACE.read_text().strip()
            else:
                config.load_kube_config(path, client_configuration=settings)
                context = config.list_kube_config_contexts(path)[1]["context"]
                self.namespace = str(context.get("namespace") or "default")
        settings.retries = False
        self._host = settings.host
        self._client = client.ApiClient(settings)
        self._core, self._objects = client.CoreV1Api(self._client), client.CustomObjectsApi(self._client)
        self._refusal = client.exceptions.ApiException

    def create(self, manifest: Record) -> str:
        """Creates the job, and gives its uid.

        Raises:
            LaunchError: It was refused, and why; or there is no such cluster.
        """
        name = manifest["metadata"]["name"]
        with self._translated("create", self._plural, name):
            made = self._objects.create_namespaced_custom_object(
                self._group, self._version, self.namespace, self._plural, manifest,
                field_validation="Strict",  # an older CRD would drop what it does not know, a time limit say
                _request_timeout=_TIMES_S,
            )  # fmt: skip
        return str(made["metadata"]["uid"])

    def create_secret(self, name: str, texts: Mapping[str, str], owner: str, uid: str) -> None:
        """Creates a Secret that goes when the job goes."""
        own = {"apiVersion": f"{self._group}/{self._version}", "kind": self.kind, "name": owner, "uid": uid}
        body = {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "ownerReferences": [own]},
            "stringData": dict(texts),
        }  # fmt: skip
        with self._translated("create", "secrets", name):
            self._core.create_namespaced_secret(self.namespace, body, _request_timeout=_TIMES_S)

    def find(self, name: str) -> Record | None:
        """The job as the cluster has it; None if it is gone."""
        with self._translated("get", self._plural, name):
            return self._unless_gone(
                lambda: self._objects.get_namespaced_custom_object(
                    self._group, self._version, self.namespace, self._plural, name, _request_timeout=_TIMES_S
                )
            )

    def pods(self, name: str) -> list[Pod]:
        """The pods of the job that have ranks, by their hosts."""
        with self._translated("list", "pods", name):
            found = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"jobset.sigs.k8s.io/jobset-name={name}",
                _request_timeout=_TIMES_S,
            )
        records = self._client.sanitize_for_serialization(found)["items"]
        pods = (pod_of(each) for each in records)
        return sorted((pod for pod in pods if pod is not None), key=lambda pod: (pod.host, pod.attempt))

    def changes_of_job(self, name: str) -> Iterator[object]:
        """Something for the job as it is, and for each of its changes, for some minutes."""
        with self._translated("watch", self._plural, name):
            yield from self._watch(
                self._objects.list_namespaced_custom_object, self._group, self._version, self.namespace, self._plural,
                field_selector=f"metadata.name={name}",
            )  # fmt: skip

    def changes_of_pods(self, name: str) -> Iterator[object]:
        """The same of the job's pods; it begins with something even if there are none."""
        yield name
        with self._translated("watch", "pods", name):
            selector = f"jobset.sigs.k8s.io/jobset-name={name}"
            yield from self._watch(self._core.list_namespaced_pod, self.namespace, label_selector=selector)

    def _watch(self, call: Callable[..., Any], *place: str, **selected: str) -> Iterator[object]:
        from kubernetes import watch

        connect_s, answer_s = _TIMES_S
        yield from watch.Watch().stream(
            call,
            *place,
            **selected,
            timeout_seconds=_WATCH_S,
            _request_timeout=(connect_s, _WATCH_S + answer_s),
        )

    def log(self, pod: Pod, **options: Any) -> str:
        """The output of a pod; empty before it has started, and after it is gone."""
        with self._translated("get", "pods/log", pod.name):
            try:
                found = self._unless_gone(
                    lambda: self._core.read_namespaced_pod_log(
                        pod.name,
                        self.namespace,
                        container=pod.container,
                        _request_timeout=_TIMES_S,
                        _preload_content=False,  # bytes: what ranks print may be no text
                        **options,
                    )
                )
            except self._refusal as refusal:
                if refusal.status == 400:  # its container has not started
                    return ""
                raise
        return "" if found is None else bytes(found.data).decode(errors="replace")

    def delete(self, name: str) -> None:
        """Deletes the job with all that it has made."""
        with self._translated("delete", self._plural, name):
            self._unless_gone(
                lambda: self._objects.delete_namespaced_custom_object(
                    self._group,
                    self._version,
                    self.namespace,
                    self._plural,
                    name,
                    propagation_policy="Foreground",
                    _request_timeout=_TIMES_S,
                )  # fmt: skip
            )

    def kill(self, pod: Pod) -> None:
        """Ends a pod without the time that it has to end by itself."""
        with self._translated("delete", "pods", pod.name):
            self._unless_gone(
                lambda: self._core.delete_namespaced_pod(
                    pod.name, self.namespace, grace_period_seconds=0, _request_timeout=_TIMES_S
                )
            )

    def _unless_gone(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._refusal as refusal:
            if refusal.status == 404:
                return None
            raise

    @contextmanager
    def _translated(self, verb: str, what: str, name: str) -> Iterator[None]:
        """Raises errors of a call of Kubernetes as a LaunchError."""
        try:
            yield
        except self._refusal as refusal:
            raise self._error(refusal, verb, what, name) from None
        except OSError as error:
            raise self._unreachable(error) from error
        except Exception as error:
            if type(error).__module__.startswith("urllib3"):
                raise self._unreachable(error) from error
            raise LaunchError(
                f"Kubernetes answered something else than was asked: {reason(error)}"
            ) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"the Kubernetes server {shown_text(str(self._host))} does not answer: {reason(error)}; "
            "kubectl cluster-info asks the same one"
        )

    def _error(self, refusal: Any, verb: str, what: str, name: str) -> LaunchError:
        status = _status(refusal.body)
        text = shown_text(str(status.get("message") or refusal.reason or refusal.status))
        where = f"-n {self.namespace}"
        code = refusal.status
        if code == 401:
            return LaunchError(f"Kubernetes does not know who asks: {text}; kubectl auth whoami asks, too")
        if code == 403:
            full = what if what not in _PLURALS.values() else f"{what}.{self._group}"
            return LaunchError(
                f"Kubernetes refuses to {verb} {name}: {text}; kubectl auth can-i {verb} {full} {where} says "
                "whether you may"
            )
        if (
            code == 404
            and what in _PLURALS.values()
            and (status.get("details") or {}).get("kind") != "namespaces"
        ):
            return LaunchError(f"the cluster has no {self.kind}: {_CONTROLLERS[self.kind]}")
        if code == 404:
            return LaunchError(f"Kubernetes does not find it: {text}; kubectl get namespaces lists them")
        if code == 409 and verb == "create":
            return LaunchError(
                f"there is {what}/{name} already, running or ended: give the job another name, or "
                f"kubectl delete {what} {name} {where}"
            )
        if code >= 500 or code == 429:
            return Unreachable(f"Kubernetes could not answer ({code}): {text}")
        return LaunchError(f"Kubernetes refuses to {verb} {name} ({code}): {text}")


def _status(body: Any) -> Mapping[str, Any]:
    """The ``Status`` in Kubernetes' refusal; empty if a proxy has sent something else."""
    try:
        status = parse_json(body if isinstance(body, str) else bytes(body or b"").decode(errors="replace"))
    except Exception:
        return {}
    return status if isinstance(status, dict) else {}
