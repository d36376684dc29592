"""Steps that can be worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulate.cases import rows
from weft.errors import ConfigError, ScheduleError
from weft.schedule import make
from weft.simulate import FREE, Edge, Idle, Links, StageCost, simulate
from weft.topology.cluster import Cluster, Link

PASS = StageCost(1.0, 2.0)


def one_f_one_b(stages, microbatches, links=FREE, costs=None):
    actions = make("1f1b", stages, microbatches).ranks
    return simulate(actions, range(stages), costs or [PASS] * stages, links)


@pytest.mark.parametrize(("microbatches", "step_s", "bubble"), [(8, 33.0, 3 / 11), (32, 105.0, 3 / 35)])
def test_1f1b(microbatches, step_s, bubble):
    step = one_f_one_b(4, microbatches)
    assert step.step_s == step_s
    assert [idle.bubble for idle in step.idle] == pytest.approx([bubble] * 4)
    assert step.bubble == step.bubble_rate == pytest.approx(bubble)


def test_1f1b_with_communication():
    assert one_f_one_b(4, 8, Links.uniform(Link(0.05))).step_s == pytest.approx(33.8)


def test_1f1b_with_a_slow_last_stage():
    step = one_f_one_b(4, 8, costs=[PASS] * 3 + [StageCost(1.3, 2.6)])
    assert step.step_s == pytest.approx(40.2)
    assert step.bubble_rate == pytest.approx(1 - 8 * 3.9 / 40.2)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12))
def test_bubble_of_equal_stages(name, stages, microbatches):
    """(p - 1) / (m + p - 1), arXiv 1811.06965."""
    actions = make(name, stages, microbatches).ranks
    step = simulate(actions, range(stages), [PASS] * stages)
    assert step.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_idle_of_1f1b_by_phase():
    """Rank 0 runs four F until 4 and its first B at 10; rank 3 its first F at 3 and its last B until 27."""
    step = one_f_one_b(4, 8)
    phases = [(6, 0, 3), (5, 0, 4), (4, 0, 5), (3, 0, 6)]
    for idle, seconds in zip(step.idle, phases, strict=True):
        assert idle[:3] == pytest.approx([part / 33 for part in seconds])
        assert idle[3:] == (0, 0)


def test_idle_in_the_steady_state():
    step = one_f_one_b(2, 3, costs=[PASS, StageCost(2.0, 4.0)])
    # rank 0: F0 0-1, F1 1-2, B0 7-9, F2 9-10, B1 13-15, B2 19-21
    assert step.start_s[0] == (0, 1, 7, 9, 13, 19)
    assert step.idle[0] == pytest.approx(Idle(5 / 21, 0, 7 / 21))
    assert step.idle[1] == pytest.approx(Idle(1 / 21, 0, 2 / 21))
    step = one_f_one_b(2, 4, costs=[PASS, StageCost(2.0, 4.0)])
    assert step.idle[0].steady == pytest.approx(3 / 27)  # B1 waits from 10 to 13, then F3 and B2


def test_overhead_of_a_crossing():
    step = one_f_one_b(2, 1, Links.uniform(Link(0.5), overhead_s=0.25))
    # rank 0: F 0-1, sends until 1.25; it is there at 1.75; rank 1: receives until 2, F 2-3, B 3-5, ...
    assert step.start_s == ((0, 6), (2, 3))
    assert step.step_s == 8
    assert step.idle[0] == Idle(4.5 / 8, 0, 0, 0.5 / 8)
    assert step.idle[1] == Idle(1.75 / 8, 0, 2.75 / 8, 0.5 / 8)
    assert moves(step) == [
        (0, "send", 0, 1, 1.75),
        (0, "recv", 0, 5.75, 6),
        (1, "recv", 1, 1.75, 2),
        (1, "send", 1, 5, 5.75),
    ]


def moves(step):
    return [
        (span.rank, span.kind, span.stage, span.start_s, span.end_s)
        for span in step.timeline.spans
        if span.kind in ("send", "recv")
    ]


def forwards(texts, costs, links, edges=()):
    """A step without backward passes: nothing in the engine asks for one."""
    return simulate(rows(*texts), range(len(texts)), costs, links, edges=edges)


def test_without_overlap_both_are_busy():
    costs = [StageCost(1.0), StageCost(3.0)]
    step = forwards(["0F0 0F1", "1F0 1F1"], costs, Links.uniform(Link(0.5), overlap=False))
    # rank 1 is busy when the second tensor is sent, and takes its half second for it later
    assert step.start_s == ((0, 1.5), (1.5, 5))
    assert step.step_s == 8
    assert step.idle[1] == Idle(1 / 8, 0, 0, 1 / 8)
    assert step.idle[0] == Idle(0, 0, 5 / 8, 1 / 8)
    assert moves(step) == [
        (0, "send", 0, 1, 1.5),
        (0, "send", 0, 2.5, 3),
        (1, "recv", 1, 1, 1.5),
        (1, "recv", 1, 4.5, 5),
    ]


def test_two_tensors_without_overlap():
    costs = [StageCost(1.0)] * 2
    links = Links.uniform(Link(0.5), overlap=False, overhead_s=0.25)
    step = forwards(["0F0", "1F0"], costs, links, edges=[Edge(0, 1, 0)])
    # sends 1.25-1.75 and 2.0-2.5, each with a quarter before; receives of 0.75 from 1.25 and from 2.0
    assert step.start_s == ((0,), (2.75,))


@pytest.mark.parametrize(("shared", "arrivals"), [(True, [13, 15]), (False, [13, 13])])
def test_a_shared_link_carries_one_transfer_at_a_time(shared, arrivals):
    """F0 sends 2 bytes to stage 1 and to stage 2 at 1, at 1 byte/s, with 10 s until the first is there."""
    costs = [StageCost(1.0, forward_bytes=2), StageCost(0.0), StageCost(0.0)]
    links = Links.uniform(Link(10.0, 1.0, shared))
    step = forwards(["0F0", "1F0", "2F0"], costs, links, edges=[Edge(0, 2, 2)])
    assert [end for rank, *_, end in moves(step) if rank == 0] == arrivals


def test_first_come_first_served():
    """F1 of microbatch 1 runs from 5 to 10; F2 of microbatch 0, which begins later, needs the link first."""
    costs = [StageCost(time, forward_bytes=1) for time in (0.0, 5.0, 1.0, 1.0)]
    fast, slow = Link(), Link(0.0, 1.0, shared=True)
    links = Links(lambda sender, receiver: fast if sender == 0 else slow)
    step = forwards(["0F0 0F1", "1F0 1F1", "2F0 2F1", "3F0 3F1"], costs, links)
    assert step.start_s == ((0, 0), (0, 5), (6, 11), (8, 13))


def test_ranks_of_a_host_share_what_leaves_it():
    """Two hosts of two; stages 0 to 3 are on ranks 0, 2, 1, 3, so that rank 0 and rank 1 send to host 1."""
    cluster = Cluster((2, 2), inter_host=Link(0.0, 1.0, shared=True))
    actions = rows(*(" ".join(f"{stage}F{i}" for i in range(5)) for stage in (0, 2, 1, 3)))
    costs = [StageCost(1.0, forward_bytes=1)] * 4
    # microbatch 0 leaves rank 0 at 1, rank 2 at 3, and rank 1 at 5, when microbatch 4 leaves rank 0: first
    step = simulate(actions, [0, 2, 1, 3], costs, Links(cluster.link))
    assert step.start_s[3][0] == 7
    alone = simulate(actions, [0, 2, 1, 3], costs, Links.uniform(Link(0.0, 1.0)))
    assert alone.start_s[3][0] == 6


def test_reduce_and_optimizer():
    actions = make("1f1b", 2, 1).ranks
    step = simulate(actions, [0, 1], [PASS] * 2, reduce_s=[0.5, 4.0], optimizer_s=[0.25, 0.0])
    assert step.finish_s == ((6, 6.5, 6.75), (4, 8, 8))
    assert step.step_s == 8
    assert step.idle == (Idle(3 / 8, 0, 1.25 / 8, 0, 0.75 / 8), Idle(1 / 8, 0, 0, 0, 4 / 8))
    finish = [span for span in step.timeline.spans if span.kind in ("reduce", "optimizer")]
    assert [(span.rank, span.kind, span.start_s, span.end_s) for span in finish] == [
        (0, "reduce", 6, 6.5),
        (0, "optimizer", 6.5, 6.75),
        (1, "reduce", 4, 8),
    ]


def test_a_rank_without_a_stage_is_idle():
    step = simulate(rows("0F0 0B0", ""), [0], [PASS])
    assert (step.bubble, step.bubble_rate, step.idle) == (0.5, 0.0, (Idle(), Idle(drain=1.0)))


def test_nothing_to_do():
    step = simulate([[]], [0], [PASS])
    assert (step.step_s, step.bubble, step.bubble_rate, step.idle) == (0.0, 0.0, 0.0, (Idle(),))
    assert step.timeline.spans == ()


def test_stages_of_one_rank_hand_over_for_nothing():
    links = Links.uniform(Link(1.0), overlap=False, overhead_s=1.0)
    step = simulate(rows("0F0 1F0 1B0 0B0"), [0, 0], [PASS] * 2, links, edges=[Edge(0, 1, 9)])
    assert step.step_s == 6.0
    assert step.moves == ()


def test_input_and_weight_passes():
    costs = [StageCost(1.0, 9.0, 2.0, 4.0)] * 2
    step = simulate(rows("0F0 0I0 0W0", "1F0 1I0 1W0"), [0, 1], costs)
    assert step.start_s == ((0, 4, 6), (1, 2, 4))


@pytest.mark.parametrize(
    ("texts", "owners", "fault"),
    [
        (["0F0 0SEND_F0"], [0], "rank 0: 0SEND_F0 is not one of F, B, I, W; leave sends and receives out"),
        (["0F0 1F0"], [0], "rank 0: 1F0 is not among 1 stages"),
        (["0F0 1F0"], [0, 1], "stage 1 is on rank 1, but there are lists of 1 ranks"),
        (["1F0", "0F0"], [0, 1], "rank 0: 1F0 is on the wrong rank, stage 1 is on rank 1"),
        (["0B0 0F0"], [0], "the ranks wait for ever: rank 0 before 0B0; .*legal.check says what is wrong"),
        (["0F0 0B0", "1B0 1F0"], [0, 1], "rank 0 before 0B0, rank 1 before 1B0"),
    ],
)
def test_lists_that_cannot_be_run(texts, owners, fault):
    with pytest.raises(ScheduleError, match=fault):
        simulate(rows(*texts), owners, [PASS] * len(owners))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"costs": [PASS] * 3}, "rank_of_stage names 2 stages, but there are costs of 3"),
        ({"edges": [Edge(1, 1, 0)]}, "an edge goes from stage 1 to 1, it must go from an earlier to a later"),
        ({"edges": [Edge(0, 2, 0)]}, "from stage 0 to 2, .* to a later one of 2 stages"),
        ({"edges": [Edge(0, 1, -5)]}, "the edge from stage 0 to 1 has -5 bytes"),
        ({"reduce_s": [1.0]}, "reduce_s has 1 numbers, but there are 2 ranks"),
        ({"optimizer_s": [1.0, math.nan]}, "optimizer_s of rank 1 is nan"),
    ],
)
def test_values_that_do_not_fit(more, text):
    arguments = {"costs": [PASS] * 2} | more
    with pytest.raises(ScheduleError, match=text):
        simulate(make("1f1b", 2, 2).ranks, [0, 1], **arguments)


def test_no_stage():
    with pytest.raises(ScheduleError, match="there is no stage, give the costs of at least one"):
        simulate([[]], [], [])


def test_all_faults_are_told():
    with pytest.raises(ScheduleError, match="stage 1 is on rank 7.*; reduce_s of rank 0 is -1"):
        simulate([[]], [0, 7], [PASS] * 2, reduce_s=[-1])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"forward_s": -1.0}, "a stage's forward_s is -1.0, it must be a finite number that is not negative"),
        ({"backward_s": math.inf, "forward_bytes": -3}, "backward_s is inf.*; a stage's forward_bytes is -3"),
        ({"activation_bytes": 5, "weight_bytes": 6}, "weight_bytes are 6, more than its activation_bytes, 5"),
        (
            {"activation_bytes": 5, "transient_bytes": 2, "weight_bytes": 8},
            "weight_bytes are 8, more than its activation_bytes, 5 and 2 transient",
        ),
    ],
)
def test_costs_that_cannot_be(values, text):
    with pytest.raises(ConfigError, match=text):
        StageCost(**values)


def test_an_overhead_that_cannot_be():
    with pytest.raises(ConfigError, match="overhead_s is nan, it must be a finite number"):
        Links(overhead_s=math.nan)
