"""A script that is rehearsed: run as the first rank of a job, and judged when it ends before its second step."""

from __future__ import annotations

import sys

from weft.errors import WeftError
from weft.launch import rank
from weft.torch.rehearse.fakes import install
from weft.torch.session import current
from weft.watch.frames import own_traceback


def main() -> None:
    """Runs the script whose path and arguments are those of this process, and shows its errors by its own lines."""
    install()
    try:
        rank.run_script()
    except SystemExit as error:
        if error.code:
            raise
    except Exception as error:
        says_all = isinstance(error, WeftError)
        print(own_traceback(error.with_traceback(rank.own_trace(error)), says_all), file=sys.stderr, end="")
        if says_all:
            print(f"weft rehearse: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    session = current.present()
    if session is None:
        print("weft rehearse: the script never called weft.init", file=sys.stderr)
        sys.exit(2)
    if not session.rehearsal.ended:
        session.rehearsal.end(session)
