"""A step, simulated: as its lists have it, or in the order in which weft's ranks run them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import ScheduleError
from weft.schedule.schedule import Action, Schedule
from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.engine import Engine, InOrder, OutOfOrder
from weft.simulate.memory import COPIES, peak_bytes
from weft.simulate.ready_queue import ReadyQueue
from weft.simulate.result import Idle, Simulation
from weft.simulate.wiring import compile_rank, wire


def simulate(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    links: Links = FREE,
    *,
    edges: Sequence[Edge] = (),
    reduce_s: Sequence[float] = (),
    optimizer_s: Sequence[float] = (),
    copies: int = COPIES,
) -> Simulation:
    """The simulation of a step: who runs what when, and the peak memory of each rank.

    Args:
        actions: For each rank its list of F, B, I and W; legal, see `weft.schedule.legal`.
        rank_of_stage: The rank that runs each stage.
        costs: What each stage costs.
        links: How tensors go from rank to rank; they take no time if not given.
        edges: Tensors that skip stages, besides those from each stage to the next.
        reduce_s: For each rank how long its gradient all-reduce takes, in seconds; none if not given.
        optimizer_s: For each rank how long its optimizer takes, in seconds; none if not given.
        copies: How often the parameters count in the peak memory.

    >>> from weft.schedule import make
    >>> schedule = make("1f1b", ranks=4, microbatches=8)
    >>> step = simulate(schedule.ranks, schedule.rank_of_stage, [StageCost(1.0, 2.0)] * 4)
    >>> step.step_s, round(step.idle[0].bubble, 4)
    (33.0, 0.2727)
    """
    ranks = len(actions)
    reduce_s = reduce_s or [0.0] * ranks
    optimizer_s = optimizer_s or [0.0] * ranks
    _check(ranks, rank_of_stage, costs, edges, {"reduce_s": reduce_s, "optimizer_s": optimizer_s})
    programs = [compile_rank(rank, own, rank_of_stage, costs) for rank, own in enumerate(actions)]
    engine = InOrder(programs, wire(rank_of_stage, costs, edges, links), links)
    engine.run()
    peaks = peak_bytes(actions, rank_of_stage, costs, copies)
    return _simulation(engine, actions, peaks, len(costs), reduce_s, optimizer_s)


def executed_order(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    links: Links = FREE,
    *,
    edges: Sequence[Edge] = (),
    ahead: int | None = 0,
) -> list[list[Action]]:
    """For each rank its actions in the order in which weft runs them, see `weft.simulate.ready_queue`.

    What never becomes possible stands at the end, and `simulate` says what it waits for.

    Args:
        actions: For each rank its list.
        rank_of_stage: The rank that runs each stage.
        costs: What each stage costs.
        links: How tensors go from rank to rank.
        edges: Tensors that skip stages, besides those from each stage to the next.
        ahead: How many more (stage, microbatch) than its list a rank may hold; None: never more at any point of the
            list, so no F begins before the B, I and W that stand before it have ended.

    Raises:
        ScheduleError: If a list has an action of a stage that is not on its rank.

    >>> from weft.schedule import make
    >>> made = make("1f1b", ranks=2, microbatches=3)
    >>> slow_end = [StageCost(1.0, 1.0), StageCost(3.0, 3.0)]
    >>> " ".join(map(str, executed_order(made.ranks, made.rank_of_stage, slow_end, ahead=1)[0]))
    '0F0 0F1 0F2 0B0 0B1 0B2'
    """
    return _order(_out_of_order(actions, rank_of_stage, costs, links, edges, ahead))


def as_weft_runs(
    made: Schedule,
    stages: Sequence[StageCost],
    links: Links,
    edges: Sequence[Edge] = (),
    copies: int = COPIES,
    ahead: int | None = 0,
    offloads: bool = False,
    held: int = 0,
) -> Simulation:
    """A step in which ranks do not wait while they can run what comes later in their lists.

    What is given, and the errors, are those of `executed_order` and `simulate`; `offloads` and `held`: see
    `weft.simulate.memory`.
    """
    _check(len(made.ranks), made.rank_of_stage, stages, edges, {})
    ready = _out_of_order(made.ranks, made.rank_of_stage, stages, links, edges, ahead)
    order = _order(ready)
    engine: Engine = ready
    if not ready.exact:
        programs = [
            own.reordered(queue.order_of_all())
            for own, queue in zip(ready.programs, ready.queues, strict=True)
        ]
        engine = InOrder(programs, ready.wiring, links)
        del ready  # as large as the other engine
        engine.run()
    peaks = peak_bytes(order, made.rank_of_stage, stages, copies, offloads, held)
    return _simulation(engine, order, peaks, len(stages))


def _out_of_order(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    links: Links,
    edges: Sequence[Edge],
    ahead: int | None,
) -> OutOfOrder:
    wiring = wire(rank_of_stage, costs, edges, links)
    programs = [compile_rank(rank, own, rank_of_stage, costs) for rank, own in enumerate(actions)]
    engine = OutOfOrder(programs, wiring, links, [ReadyQueue(own, ahead) for own in actions])
    engine.run()
    return engine


def _order(ready: OutOfOrder) -> list[list[Action]]:
    return [[queue.actions[number] for number in queue.order_of_all()] for queue in ready.queues]


def _simulation(
    engine: Engine,
    actions: Sequence[Sequence[Action]],
    peaks: tuple[int, ...],
    stages: int,
    reduce_s: Sequence[float] = (),
    optimizer_s: Sequence[float] = (),
) -> Simulation:
    """The result of an engine; an error if not all ranks have come to the ends of their lists."""
    _check_done(engine, actions)
    none = [0.0] * len(actions)
    finish_s = [
        (end, end + reduce, end + reduce + optimizer)
        for end, reduce, optimizer in zip(engine.free, reduce_s or none, optimizer_s or none, strict=True)
    ]
    step_s = max((end for _, _, end in finish_s), default=0.0)
    return Simulation(
        actions=tuple(map(tuple, actions)),
        start_s=tuple(map(tuple, engine.starts)),
        end_s=tuple(map(tuple, engine.ends)),
        step_s=step_s,
        idle=tuple(
            _idle(own, engine.waits_s(rank), engine.transfer_s[rank], finish_s[rank], step_s)
            for rank, own in enumerate(actions)
        ),
        peak_bytes=peaks,
        stages=stages,
        moves=tuple(engine.moves),
        finish_s=tuple(finish_s),
    )


def _check_done(engine: Engine, actions: Sequence[Sequence[Action]]) -> None:
    stuck = [(rank, len(ends)) for rank, ends in enumerate(engine.ends) if len(ends) < len(actions[rank])]
    if stuck:
        where = ", ".join(f"rank {rank} before {actions[rank][at]}" for rank, at in stuck)
        raise ScheduleError(
            f"the ranks wait for ever: {where}; what they need never comes, "
            "weft.schedule.legal.check says what is wrong with the lists"
        )


def _idle(
    actions: Sequence[Action],
    waits: Sequence[float],
    transfer_s: float,
    finish_s: tuple[float, float, float],
    step_s: float,
) -> Idle:
    """The shares of a rank; `waits`: how long it had nothing to do before each action."""
    if not step_s:
        return Idle()
    count = len(actions)
    backward = next((at for at in range(count) if actions[at].kind in ("B", "I")), count) + 1
    forward = max(backward, next((at + 1 for at in range(count - 1, -1, -1) if actions[at].kind == "F"), 0))
    begin, _, end = finish_s
    warmup, steady, drain = sum(waits[:backward]), sum(waits[backward:forward]), sum(waits[forward:])
    return Idle(*(time / step_s for time in (warmup, steady, drain + step_s - end, transfer_s, end - begin)))


def _check(
    ranks: int,
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    edges: Sequence[Edge],
    seconds: dict[str, Sequence[float]],
) -> None:
    faults = [] if costs else ["there is no stage, give the costs of at least one"]
    if len(rank_of_stage) != len(costs):
        faults.append(f"rank_of_stage names {len(rank_of_stage)} stages, but there are costs of {len(costs)}")
    for stage, rank in enumerate(rank_of_stage):
        if not 0 <= rank < ranks:
            faults.append(f"stage {stage} is on rank {rank}, but there are lists of {ranks} ranks")
    for source, target, size in edges:
        if not 0 <= source < target < len(costs):
            faults.append(
                f"an edge goes from stage {source} to {target}, it must go from an earlier "
                f"to a later one of {len(costs)} stages"
            )
        if size < 0:
            faults.append(f"the edge from stage {source} to {target} has {size} bytes")
    for name, given in seconds.items():
        if len(given) != ranks:
            faults.append(f"{name} has {len(given)} numbers, but there are {ranks} ranks")
        faults += [f"{name} of rank {rank} is {time}" for rank, time in enumerate(given) if not time >= 0]
    if faults:
        raise ScheduleError("; ".join(faults))
