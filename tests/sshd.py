"""An sshd of a test's own on the loopback, and how ssh reaches it: two addresses stand for two hosts."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HOSTS = ("127.0.0.1", "127.0.0.2")
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
needs_sshd = pytest.mark.skipif(
    _SSHD is None or shutil.which("ssh") is None, reason="no sshd here (Debian: openssh-server)"
)


@contextlib.contextmanager
def running(folder: Path, more: Sequence[str] = ()) -> Iterator[Path]:
    """A server as long as the block runs; the path of a configuration for `ssh -F`, which knows the server's key.

    `more`: lines at the end of the server's configuration.
    """
    assert _SSHD is not None
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "user_key.pub").read_text())
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of Debian locks a child up
    lines = [f"Port {port}", *(f"ListenAddress {host}" for host in HOSTS), f"HostKey {folder}/host_key"]
    lines += [f"AuthorizedKeysFile {folder}/authorized", "PidFile none", "StrictModes no", "UsePAM no"]
    (folder / "sshd_config").write_text(
        "\n".join([*lines, "PasswordAuthentication no", "MaxStartups 100", *more, ""])
    )
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"[{host}]:{port} {key}\n" for host in HOSTS))
    (folder / "config").write_text(
        f"Host *\n Port {port}\n User {getpass.getuser()}\n IdentityFile {folder}/user_key\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known\n GlobalKnownHostsFile /dev/null\n"
    )
    server = subprocess.Popen([_SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")])
    try:
        deadline = time.monotonic() + 30
        while not _answers(port) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield folder / "config"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOSTS[0], port), 1):
        return True
    return False
