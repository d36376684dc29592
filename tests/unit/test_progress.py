"""The line about a running loop."""

import pytest

from weft.errors import UsageError
from weft.watch.progress import Progress, Ranks


class Screen:
    def __init__(self, how: str, width: int = 200) -> None:
        self.now, self.written = 100.0, []
        self.progress = Progress(how, self.written.append, width, clock=lambda: self.now)

    def steps(self, count: int, each_s: float, **what) -> None:
        for _ in range(count):
            self.now += each_s
            self.progress.step(**what)


def test_a_short_loop_shows_nothing():
    screen = Screen("terminal")
    screen.steps(5, 0.1)
    screen.progress.close()
    assert screen.written == []


def test_a_terminal_has_one_line_that_is_written_over_itself_and_stays_at_the_end():
    screen = Screen("terminal")
    screen.progress.begin(40)
    screen.steps(16, 0.125, samples=8, ranks=lambda: Ranks((0.125, 0.25), 3 * 2**30), loss=lambda: 2.34567)
    assert len(screen.written) == 5  # at 1.0, 1.25, ... 2 s
    assert screen.written[0] == (
        "step 8 of 40 ##........ 0:04 left | 125 ms | 64 samples/s | idle 12% 25% | 3 GiB | loss 2.346\r"
    )
    screen.steps(1, 0.125)
    screen.progress.close()
    assert screen.written[-1] == screen.written[-2].replace("\r", "\n").replace("step 16", "step 17")


def test_elsewhere_a_line_comes_every_ten_seconds():
    screen = Screen("plain")
    screen.steps(25, 1.0)
    assert screen.written == ["step 10 | 1 s\n", "step 20 | 1 s\n"]


def test_values_of_the_script_stand_for_the_loss_and_show_no_control_characters():
    screen = Screen("plain")
    screen.progress.note({"lr\x1b[2J": 0.001, "accuracy": 0.5})
    screen.steps(10, 1.0, loss=lambda: 1.0)
    assert screen.written == ["step 10 | 1 s | lr\\x1b[2J 0.001 | accuracy 0.5\n"]


def test_what_costs_time_is_asked_only_when_it_is_shown():
    asked = []
    screen = Screen("plain")
    screen.steps(30, 1.0, loss=lambda: asked.append(0))
    assert len(asked) == 3


def test_a_narrow_terminal_and_long_times():
    screen = Screen("terminal", width=30)
    screen.progress.begin(10_000)
    screen.steps(2, 1.0)
    assert screen.written[0] == "step 1 of 10000 .......... 2:\r"


def test_another_word_is_refused():
    with pytest.raises(UsageError, match='WEFT_PROGRESS is "loud": it must be terminal, plain or off'):
        Progress("loud", print)
