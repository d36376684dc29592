"""Metrics of a running job for Prometheus: served by the launcher on this host's loopback, never by a rank.

    weft_up                    1 while the rank runs
    weft_steps_total           steps so far, without those that only evaluate
    weft_step_seconds          a step: the mean of the last ones if the job records, else since the request before
    weft_samples_per_second    of the rank's last steps, if the job records
    weft_idle_ratio            the share of its last step, or steps, in which a rank had nothing to run
    weft_memory_bytes          what it had in use
    weft_value                 what the script gave to weft.log last; the label `name` says which

All have the label `rank`. A rank has at most `MOST_VALUES` + 6 of them. Requests are answered by a thread of the
launcher, a few at a time; whatever else comes is refused or dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from weft.analysis.run import Step
from weft.errors import FormatError, LaunchError
from weft.profiler.clock import clock_offset_s
from weft.profiler.live.following import Follower, Tail
from weft.terminal_text import visible
from weft.untrusted import cut, parse_json
from weft.watch.heartbeat import Sign, State

MOST_VALUES = 16
"""So many names of logged values are exported."""
LAST = 20
"""Steps of a recording that a mean is made of."""
_AHEAD_S = 5.0
"""The clock of a file server may be so far behind."""
_MOST_REQUESTS = 8
"""So many requests are answered at once."""
_PATIENCE_S = 5.0
_LOOPBACK = "127.0.0.1"


class Pace:
    """The seconds of a step, seen from outside: from one look to the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[int, tuple[float, int]] = {}
        self._took: dict[int, float] = {}

    def of(self, rank: int, steps: int) -> float:
        """Seconds a step took since the last look that saw fewer; 0 before that."""
        now = self._clock()
        then_s, then = self._before.setdefault(rank, (now, steps))
        if steps != then:
            if steps > then and now > then_s:
                self._took[rank] = (now - then_s) / (steps - then)
            self._before[rank] = (now, steps)
        return self._took.get(rank, 0.0)


class Logged:
    """The last values that the first rank logged, from the file that it writes.

    ``since_s``: when the job began, in seconds since 1970. Files that were written last before that are of others: in a
    container the first rank of every job may have the same number.
    """

    def __init__(self, folder: Path, since_s: float | None = None) -> None:
        self._folder = folder
        now_s = time.perf_counter() + clock_offset_s()  # which files are compared with
        self._since_s = now_s - _AHEAD_S if since_s is None else since_s
        self._tail: tuple[int, Tail] | None = None
        self._left = b""
        self._values: dict[str, float] = {}

    def of(self, process: int) -> Mapping[str, float]:
        """Those of the job whose first rank is this process, by name; the first `MOST_VALUES` that came."""
        if self._tail is None or self._tail[0] != process:
            with suppress(OSError):
                found = [(path.stat().st_mtime, path) for path in self._folder.glob(f"*-{process}.jsonl")]
                if found and max(found)[0] >= self._since_s:
                    self._tail, self._left, self._values = (process, Tail(max(found)[1])), b"", {}
        if self._tail is not None:
            *lines, self._left = (self._left + self._tail[1].more()[1]).split(b"\n")
            for line in lines:
                self._take(line)
        return self._values

    def _take(self, line: bytes) -> None:
        with suppress(FormatError, UnicodeDecodeError):
            found = parse_json(line.decode("utf-8"))
            values = found.get("values") if isinstance(found, dict) else None
            for name, value in values.items() if isinstance(values, dict) else ():
                known = name in self._values or len(self._values) < MOST_VALUES
                if known and isinstance(value, (int, float)):
                    self._values[name] = float(value)


class Collector:
    """The metrics of a scrape; see the module.

    Args:
        signs: What the ranks show of themselves.
        recording: Where the job records, if it does.
        values: Where the script's values are written.
    """

    def __init__(
        self, signs: Callable[[], Mapping[int, Sign]], recording: Path | None, values: Path, pace: Pace | None = None
    ) -> None:  # fmt: skip
        self._signs = signs
        self._follower = None if recording is None else Follower(recording)
        self._logged = Logged(values)
        self._pace = pace or Pace()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Any]:
        """The families of metrics, as prometheus-client wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            rows = list(self._rows())
        families: dict[str, Any] = {}
        for name, rank, value, labels in rows:
            if name not in families:
                kind = CounterMetricFamily if name == "weft_steps" else GaugeMetricFamily
                families[name] = kind(name, MEANINGS[name], labels=["rank", *labels])
            families[name].add_metric([str(rank), *labels.values()], value)
        return families.values()

    def _rows(self) -> Iterator[tuple[str, int, float, Mapping[str, str]]]:
        run = self._follower.look() if self._follower is not None else None
        signs = self._signs()
        for rank, sign in signs.items():
            if sign.state is State.ABSENT:
                continue
            steps = run.steps.get(rank, ())[-LAST - 1 :] if run is not None else ()
            for name, value in self._of(rank, sign, steps).items():
                yield name, rank, value, {}
        first = signs.get(0)
        for name, value in self._logged.of(first.pid).items() if first is not None and first.pid else ():
            yield "weft_value", 0, value, {"name": visible(cut(name, 80))}

    def _of(self, rank: int, sign: Sign, steps: tuple[Step, ...]) -> dict[str, float]:
        trained = (sign.step or 0) - sign.evaluations
        found = {"weft_up": float(sign.state is State.RUNNING), "weft_steps": float(trained)}
        took_s = self._pace.of(rank, trained)
        idle, memory_bytes = sign.idle, sign.memory_bytes
        if len(steps) > 1 and steps[-1].start_s > steps[0].start_s:
            seconds = steps[-1].start_s - steps[0].start_s
            took_s = seconds / (len(steps) - 1)
            idle = max(0.0, 1.0 - sum(step.work_s for step in steps[:-1]) / seconds)
            memory_bytes = steps[-1].memory_bytes or memory_bytes
            if samples := sum(step.samples for step in steps[:-1]):
                found["weft_samples_per_second"] = samples / seconds
        if took_s:
            found |= {"weft_step_seconds": took_s, "weft_idle_ratio": idle}
        if memory_bytes:
            found["weft_memory_bytes"] = float(memory_bytes)
        return found


MEANINGS = {
    "weft_up": "1 while the rank runs",
    "weft_steps": "Steps so far, without those that only evaluate",
    "weft_step_seconds": "How long a step takes, from the begin of one to that of the next",
    "weft_samples_per_second": "Samples that the rank takes in",
    "weft_idle_ratio": "Share of the step in which the rank has nothing to run",
    "weft_memory_bytes": "Memory in use: of the process on a CPU, of the device on a GPU",
    "weft_value": "What the script gave to weft.log last",
}


class _Server(ThreadingHTTPServer):
    """Answers a few requests at once; what goes wrong with one of them is nobody's but its sender's."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return


class Endpoint:
    """The endpoint, open but not yet answering, so that a port that is taken is an error before anything runs.

    Raises:
        LaunchError: prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise LaunchError(
                "--metrics-port needs prometheus-client: pip install 'weft[prometheus]', or leave the option out"
            ) from error
        self._collector: Collector | None = None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/metrics", "/"):
                    self.send_error(404)
                    return
                content = endpoint.text()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                return

        try:
            self._server = _Server((_LOOPBACK, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LaunchError(
                f"--metrics-port {port} cannot be listened at: {reason}; name another one, or 0 for any"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="weft-metrics", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}/metrics"

    def text(self) -> bytes:
        """The text that a request gets."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        if self._collector is not None:
            registry.register(self._collector)
        return generate_latest(registry)

    def start(self, collector: Collector) -> None:
        """Answer from now on; or of another job, one that was started again."""
        self._collector = collector
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        if self._thread.ident is not None:
            self._server.shutdown()
        self._server.server_close()
