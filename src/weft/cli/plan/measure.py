"""`weft plan --measure FILE`: a machine's file of the machine at hand."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from weft.cli.draw import write
from weft.errors import LaunchError, UsageError
from weft.machines.machine_file import host_to_json
from weft.measure.machine import host_of, measured_from_json
from weft.tune.trial import weft_run
from weft.units import format_seconds
from weft.untrusted import read_file
from weft.watch.process import die_with_parent

SECONDS = 600
MODULE = "weft.torch.data_parallel.machine"


def measure(out: Path, ranks: int) -> None:
    """Measure with so many ranks at once, write the file, and say what is in it.

    Raises:
        LaunchError: A rank failed, or it took longer than `SECONDS`; nothing is written then.
    """
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}, it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="weft-measure-") as folder:
        environ = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **os.environ}
        try:
            done = subprocess.run(
                [*weft_run(["-n", str(ranks), "-m", MODULE]), folder],
                env=environ, capture_output=True, text=True, timeout=SECONDS, check=False,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"measuring took more than {SECONDS} s: try it when nothing else runs on this machine"
            ) from error
        if done.returncode:
            raise LaunchError(
                f"measuring failed: {done.stderr.strip()[-1000:] or f'exit code {done.returncode}'}"
            )
        found = [read_file(Path(folder, f"rank{rank}.json"), measured_from_json) for rank in range(ranks)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = host_of(socket.gethostname(), found, memory)
    write(out, host_to_json(host) + "\n")
    device = host.accelerator
    rates = ", ".join(f"{device.rate(dtype) / 1e9:,.0f} GFLOP/s in {dtype}" for dtype in device.peak)
    sums = f"; sums over them run at {host.inside.bytes_per_s / 1e9:.3g} GB/s" if ranks > 1 else ""
    print(
        f"{out}: {ranks} x {device.name}, each {rates}, {device.bytes_per_s / 1e9:.3g} GB/s of memory{sums}, "
        f"{format_seconds(host.inside.latency_s)} a turn. The network between hosts is not measured: write it into the "
        "file"
    )
