"""The first batch of a trace is compared with one process; see `run_verify`. And `weft verify` for such scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.long import long, one_in  # noqa: E402
from tests.parity.jobs import PATHS, Outcome, outcomes  # noqa: E402
from tests.parity.tensorflow.jobs import checks_of, run, start  # noqa: E402

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1200)

OutcomeOf = Callable[[int, str], Outcome]
ENDS = ("wrong_output", "wrong_gradient", "wrong_state")
CHECKS = [name for name in checks_of("run_verify.py") if name not in ENDS]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a check on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "tensorflow/run_verify.py", "check", start)


@pytest.mark.parametrize(("ranks", "check"), one_in(2, [(2, name) for name in CHECKS]), ids=str)
def test_right_programs_pass(ranks: int, check: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, check)
    assert not outcome.faults(), outcome.faults()


@pytest.mark.parametrize("kind", one_in(3, ENDS))
def test_wrong_programs_end_the_step_before_a_weight_changes(kind: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("run_verify.py")
    _, output = run(["run", "-n", "2", str(script), kind, "--partitions", "2"], PATHS, tmp_path, 300)
    assert output.count('"ok": true') == 2, output


SCRIPT = """
import sys, keras, tensorflow as tf
import weft.tensorflow as weft

keras.utils.set_random_seed(0)
weft.init({"partitions": 2, "microbatches": 4})
layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(32, "tanh"), keras.layers.Dense(4)]
if sys.argv[1] == "wrong":
    by = 1.0 + weft.rank()
    layers.insert(2, keras.layers.Lambda(lambda x: x * by))
model = weft.DistributedModel(keras.Sequential(layers))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = tf.random.stateless_normal([128, 16], seed=[0, 1])
model.fit(x, tf.argmax(x[:, :4], 1), batch_size=32, epochs=5, verbose=0)
raise AssertionError("the job goes on after three steps")
"""


@long
@pytest.mark.parametrize(("kind", "code"), [("wrong", 1), ("right", 0)])
def test_the_command_compares_three_steps(
    kind: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.cli.main import main

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", PATHS["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["verify", "-n", "2", "--schedules", "gpipe", str(script), kind]) == code
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("gpipe")]
    assert [line[:2] for line in lines] == [["gpipe", str(step)] for step in (1, 2, 3)]
    for line in lines:
        assert (line[4:] == ["equal"]) == (kind == "right"), line


def test_schedules_that_split_backward_passes_are_left_out() -> None:
    from weft.cli.verify import refusal

    assert refusal("zb_h1", None, "tensorflow").startswith("TensorFlow takes gradients as a whole")
    assert not refusal("gpipe", None, "tensorflow") and not refusal("zb_h1", None)
