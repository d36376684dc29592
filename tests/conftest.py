"""What all tests have in common."""

from __future__ import annotations

import contextlib
import os
import signal

import hypothesis
import pytest

from tests import gpus, long, warm

gpus.hide()
os.environ[long.SEED] = long.seed()  # workers that begin after midnight draw as the first one

# Tests that are started in the background, or with nohup, have signals ignored. What they start would ignore them too.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    with contextlib.suppress(ValueError):  # on another thread
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _usual)

# A machine that does other things too may take long over one example, and no test asserts a time.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")

LONG = (
    "tests/fuzz/test_fuzz.py", "tests/parity/test_behaviour.py", "tests/parity/test_zoo.py",
    "tests/parity/test_schedules.py", "tests/unit/test_benchmarks.py", "tests/fault/test_training.py",
    "tests/parity/test_checkpoints.py", "tests/fault/test_launchers.py", "tests/fault/test_launched.py",
    "tests/fault/test_saving.py", "tests/unit/test_docs.py", "tests/parity/test_data_parallel.py",
    "tests/parity/test_reductions.py", "tests/parity/test_shares.py", "tests/parity/test_smdistributed.py",
    "tests/parity/test_sharded.py", "tests/unit/test_examples.py", "tests/fault/test_waits.py",
    "tests/fault/test_streams.py", "tests/unit/test_wheel.py", "tests/unit/torch/test_watching.py",
    "tests/scripts/test_scripts.py",
    "tests/parity/tensorflow/test_models.py", "tests/parity/tensorflow/test_checks.py",
    "tests/parity/tensorflow/test_replicas.py", "tests/parity/tensorflow/test_checkpoints.py",
    "tests/fault/test_tensorflow.py",
    "tests/integrations/test_ray.py", "tests/integrations/test_lightning.py", "tests/integrations/test_transformers.py",
    "tests/integrations/test_accelerate.py", "tests/integrations/test_fabric.py",
)  # fmt: skip
"""Files whose tests take minutes come first: a file runs on one worker, and others would wait for the last ones."""


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist, which begin after this, share what jobs are forked from."""
    if getattr(config.option, "numprocesses", None) and warm.ADDRESS not in os.environ:
        os.environ[warm.ADDRESS] = warm.serve()


def pytest_report_header() -> str:
    return f"cases are drawn by {long.SEED}={long.seed()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return LONG.index(file) if file in LONG else len(LONG)

    items.sort(key=place)


_ended: list[object] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    if error:
        _ended.append(node)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run whose worker ended has left tests out: another code than where all have run and some have failed."""
    if _ended:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
