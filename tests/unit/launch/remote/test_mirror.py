"""Two pages that are kept alike by messages."""

from __future__ import annotations

from collections.abc import Callable

from weft.launch.remote.mirror import SLOWLY_S, Mirror
from weft.watch.heartbeat import Page, State


class Hosts:
    """A launcher and two agents, with a rank each; time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pages = [Page.private(2) for _ in range(3)]
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.agents = [Mirror(self.pages[n], "agent", [n], leads=n == 0, clock=clock) for n in range(2)]
        self.launcher = [
            Mirror(self.pages[2], "launcher", [1 - n], every_s=SLOWLY_S, clock=clock) for n in range(2)
        ]

    def pass_on(self, seconds: float = 1.0) -> int:
        """All messages, both ways; how many there were."""
        self.now += seconds
        count = 0
        for agent, launcher in zip(self.agents, self.launcher, strict=True):
            for message in [*agent.changes()]:
                count += launcher.apply(message)
        for agent, launcher in zip(self.agents, self.launcher, strict=True):
            for message in [*launcher.changes()]:
                count += agent.apply(message)
        return count


def test_signs_reports_and_the_leader_reach_all():
    hosts = Hosts()
    hosts.pages[0].slot(0).open(3.0, 60.0)
    hosts.pages[0].leader = "here"
    slot = hosts.pages[1].slot(1)
    slot.open(3.0, 60.0)
    slot.note("forward", step=4, microbatch=1, module="layers.0")
    hosts.pages[1].write_report(1, "it failed")
    hosts.pass_on()
    assert all(page.leader == "here" for page in hosts.pages)
    assert [page.sign(1).where() for page in hosts.pages] == ["step 4, microbatch 1, forward of layers.0"] * 3
    assert [page.sign(0).state for page in hosts.pages] == [State.RUNNING] * 3
    assert [page.report(1) for page in hosts.pages] == ["", "it failed", "it failed"]


def test_the_job_is_asked_to_save_and_ends():
    hosts = Hosts()
    for page in hosts.pages[:2]:
        page.course.heeded = 1
    hosts.pages[0].course.saves = 2
    hosts.pass_on()
    assert (hosts.pages[2].course.heeded, hosts.pages[2].course.saves) == (1, 2)
    hosts.pages[2].course.asked = 1
    hosts.pages[2].end()
    hosts.pass_on()
    assert all(page.course.asked and page.ending for page in hosts.pages[:2])
    hosts.pages[1].course.heeded = 0
    hosts.pass_on()
    assert (hosts.pages[2].course.heeded, hosts.pages[2].course.saves) == (0, 2)


def test_what_only_goes_on_is_told_slowly_to_other_hosts():
    hosts = Hosts()
    slot = hosts.pages[1].slot(1)
    slot.open(3.0, 60.0)
    hosts.pass_on()
    assert hosts.pass_on() == 0
    slot.beat()
    assert hosts.pass_on(0.01) == 0
    assert hosts.pass_on(1.0) == 1 and hosts.pages[2].sign(1).beat == 1 and hosts.pages[0].sign(1).beat == 0
    hosts.pass_on(SLOWLY_S)
    assert hosts.pages[0].sign(1).beat == 1
    slot.set_state(State.FINISHING)
    hosts.pass_on(0.2)
    assert hosts.pages[0].sign(1).state is State.FINISHING


def test_what_is_no_message_about_the_page():
    mirror = Hosts().agents[0]
    assert not mirror.apply(({"kind": "ping"}, b"")) and not mirror.apply(
        ({"kind": "sign", "rank": 7}, b"x" * 512)
    )
