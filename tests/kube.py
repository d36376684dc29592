"""A server that speaks as much of Kubernetes as a job asks for, in memory, on the loopback interface."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "team"


class Kube:
    """Objects by their paths, logs by pods, and refusals that a test asks for.

    Attributes:
        objects: What was created, and pods that a test puts there.
        logs: The bytes of each pod's log, a time before each line.
        asked: Every request: its method, its path, and what it asks besides.
        refusals: By method and the last part of the path: code and body of a refusal.
        watches: Whether it tells of changes to who may watch; else watching is refused.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.refusals: dict[tuple[str, str], tuple[int, Any]] = {}
        self.finalized = True
        self.watches = False
        self.number = 0

    def job(self) -> dict[str, Any]:
        """The only job that there is."""
        (found,) = (each for path, each in self.objects.items() if "/apis/" in path)
        return found

    def pod(self, host: int, job: str = "train", attempt: int = 0, **status: Any) -> str:
        """Puts a pod of a job there, or changes it; gives its name."""
        name = f"{job}-node-0-{host}-{'xyz'[attempt]}"
        labels = {
            "jobset.sigs.k8s.io/jobset-name": job, "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "batch.kubernetes.io/job-completion-index": str(host),
            "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        }  # fmt: skip
        self.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"] = {
            "metadata": {"name": name, "labels": labels}, "spec": {"nodeName": f"machine{host}",
            "containers": [{"name": "node", "image": "i"}]}, "status": status,
        }  # fmt: skip
        return name

    def end(self, host: int, code: int, reason: str = "Error", second: int = 0) -> str:
        """A pod whose container has ended."""
        end = {"exitCode": code, "reason": reason, "finishedAt": f"2026-01-01T00:00:{second:02}Z"}
        return self.pod(
            host, phase="Failed" if code else "Succeeded", containerStatuses=[container(terminated=end)]
        )

    def condition(self, kind: str, **told: str) -> None:
        """What the controller says of the job."""
        self.job()["status"] = {"conditions": [{"type": kind, "status": "True", **told}]}

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """The code and the body of an answer."""
        self.asked.append((method, path, query))
        if query.get("watch"):
            return 403, status("watching is forbidden", "Forbidden")
        if refusal := self.refusals.get((method, path.rpartition("/")[2])):
            return refusal
        if path.endswith("/log"):
            return self._log(path, query)
        if method == "POST":
            name = body["metadata"]["name"]
            if f"{path}/{name}" in self.objects:
                return 409, status(f'{name} "{name}" already exists', "AlreadyExists")
            self.number += 1
            body["metadata"]["uid"] = f"uid-{self.number}"
            self.objects[f"{path}/{name}"] = body
            return 201, body
        if path.endswith("/pods"):
            label, _, wanted = query["labelSelector"].partition("=")
            pods = [each for at, each in self.objects.items() if at.startswith(f"{path}/")]
            found = [each for each in pods if each["metadata"]["labels"].get(label) == wanted]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}
        if path not in self.objects:
            return 404, status("not found", "NotFound")
        if method == "DELETE":
            return self._delete(path)
        return 200, self.objects[path]

    def watched(self, path: str, query: dict[str, str]) -> dict[str, str]:
        """What a watch at a path is told of, as JSON."""
        label, _, wanted = query.get("labelSelector", "").partition("=")
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        return {
            at: json.dumps(each)
            for at, each in dict(self.objects).items()
            if at.rpartition("/")[0] == path
            and (at.endswith(f"/{name}") if name else each["metadata"]["labels"].get(label) == wanted)
        }

    def _delete(self, path: str) -> tuple[int, Any]:
        del self.objects[path]
        if "/apis/" in path and self.finalized:
            self.objects = {at: each for at, each in self.objects.items() if "/pods/" not in at}
        uids = {each["metadata"].get("uid") for each in self.objects.values()}
        for at, each in [*self.objects.items()]:
            owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]
            if owners and not uids & {*owners}:
                del self.objects[at]
        return 200, status("", "")

    def _log(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        name = path.split("/")[-2]
        pod = self.objects.get(path.removesuffix("/log"))
        if pod is None:
            return 404, status(f"pods {name} not found", "NotFound")
        if name not in self.logs:
            return 400, status(
                f"container in pod {name} is waiting to start: ContainerCreating", "BadRequest"
            )
        text = self.logs[name]
        if query.get("timestamps", "").lower() != "true":
            text = "".join(line.partition(" ")[2] for line in text.splitlines(keepends=True))
        return 200, text


def container(**state: Any) -> dict[str, Any]:
    """The status of a container."""
    return {"name": "node", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}


def status(message: str, reason: str, **details: str) -> dict[str, Any]:
    """What Kubernetes says with a refusal."""
    return {"kind": "Status", "apiVersion": "v1", "message": message, "reason": reason, "details": details}


@contextmanager
def kube(folder: Path) -> Iterator[tuple[Kube, dict[str, str]]]:
    """A server that runs, and the environment in which it is found."""
    fake, ended = Kube(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            if ended.is_set():  # on a connection from before
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: texts[0] for name, texts in parse_qs(parts.query).items()}
            if query.get("watch") and fake.watches:
                fake.asked.append(("WATCH", parts.path, query))
                self._tell(parts.path, query)
                return
            code, found = fake.answer(self.command, parts.path, query, json.loads(body) if body else None)
            data = (found if isinstance(found, str) else json.dumps(found)).encode(errors="surrogateescape")
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _tell(self, path: str, query: dict[str, str]) -> None:
            """What is there and each change of it, until the server ends."""
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            seen: dict[str, str] = {}
            while fake.watches:
                now = fake.watched(path, query)
                for at in {*seen, *now}:
                    kind = "DELETED" if at not in now else "MODIFIED" if at in seen else "ADDED"
                    if seen.get(at) != now.get(at):
                        event = f'{{"type": "{kind}", "object": {now.get(at) or seen[at]}}}\n'.encode()
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                seen = now
                time.sleep(0.02)
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield fake, environ_of(folder, server.server_address[1])
        finally:
            fake.watches = False
            ended.set()
            server.shutdown()
            thread.join()


def environ_of(folder: Path, port: int) -> dict[str, str]:
    """A file that says where the cluster is, and the variable that names it."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [{"name": "test", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return {"KUBECONFIG": str(path)}
