"""What all tests have in common."""

from __future__ import annotations

import contextlib
import signal

import hypothesis

from tests import gpus

gpus.hide()

# Tests that are started in the background, or with nohup, have signals ignored. What they start would ignore them too.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    with contextlib.suppress(ValueError):  # on another thread
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _usual)

# A machine that does other things too may take long over one example, and no test asserts a time.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")
