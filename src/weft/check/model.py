"""Checks of how the model and its optimizer are made: wraps, seeds, normalisation, rates."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.ranks import differs_in_pipeline
from weft.check.script import STARTERS, WEFT, Script, argument, dotted, keyword, last_name, rewritten
from weft.check.training import Training
from weft.rules.replicas import SmallBatchNorm

MOST_VALUES = 20
"""What is assigned more often is not followed."""
SIZES = ("dp_size", "rdp_size", "size", "world_size", "get_world_size", "num_replicas")
RATES = ("scale_lr", "WarmUp")
WRAPPERS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
)
SEEDS = ("manual_seed", "manual_seed_all", "set_seed", "seed_everything")
NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


def wrapped_twice(script: Script, training: Training) -> Iterator[Finding]:
    """Two libraries average the gradients of one model."""
    weft = f"{WEFT}.DistributedModel"
    for call in script.named(weft, *WRAPPERS):
        inner = argument(call, 0, "module")
        outer = script.name(call.func)
        made = _made(script, inner, call)
        maker = script.name(made.func) if made is not None else ""
        if inner is not None and (maker in WRAPPERS if outer == weft else maker == weft):
            yield Finding(
                "wrapped_twice",
                Grade.WRONG,
                call.lineno,
                "DistributedModel averages gradients over copies by itself, so each of the two is in the other's way",
                f"{script.weft}.DistributedModel({_innermost(script, inner, call)})",
            )


def optimizer_before_wrap(script: Script, training: Training) -> Iterator[Finding]:
    """The optimizer has parameters that the wrap replaces."""
    degree = (script.settings or {}).get("sharded_data_parallel_degree")
    if not isinstance(degree, int) or degree < 2 or (script.settings or {}).get("partitions", 1) != 1:
        return
    wrapping = script.named(f"{WEFT}.DistributedModel")
    wraps = [call.lineno for call in wrapping]
    for call in script.calls:
        if script.name(call.func).startswith("torch.optim.") and "lr_scheduler" not in script.name(call.func):
            wrap = next((line for line in wraps if line > call.lineno), None)
            same = script.function_of(call) is script.function_of(wrapping[0]) if wrapping else False
            if wrap is not None and len(wraps) == 1 and same:
                yield Finding(
                    "optimizer_before_wrap",
                    Grade.WRONG,
                    call.lineno,
                    f"with sharded parameters DistributedModel (line {wrap}) replaces those that this optimizer has, "
                    "so it updates nothing",
                    f"{ast.unparse(call)}  # after line {wrap}",
                )


def seed_by_rank(script: Script, training: Training) -> Iterator[Finding]:
    """Ranks of one pipeline draw different random numbers."""
    if not script.splits or script.partitions == 1 or (script.settings or {}).get("inputs"):
        return
    shuffled = any(
        loader.says("shuffle") and loader.sampler is None and keyword(loader.call, "generator") is None
        for loader in training.loaders
    )
    for call in script.ending(*SEEDS):
        if not any(differs_in_pipeline(script, each) for each in call.args) or ".cuda." in script.name(
            call.func
        ):
            continue
        yield Finding(
            "seed_by_rank",
            Grade.WRONG if shuffled and script.partitions else Grade.HINT,
            call.lineno,
            "the ranks of one pipeline draw different numbers, "
            + (
                "so they shuffle differently and read different batches"
                if shuffled
                else "also for data and masks"
            ),
            f"{ast.unparse(call.func)}({script.weft}.dp_rank())  # or the same number everywhere",
        )


def small_batch_norm(script: Script, training: Training) -> Iterator[Finding]:
    """Batch normalisation sees few samples at a time."""
    cut, limits = script.microbatches or 1, SmallBatchNorm()
    batches = {script.whole(loader.batch_size) for loader in training.loaders}
    batch = batches.pop() if len(batches) == 1 else None
    if (
        batch is None
        or batch // cut >= limits.least
        or any("convert_sync" in last_name(c.func) for c in script.calls)
    ):
        return
    for call in script.ending(*NORMS)[:1]:
        yield Finding(
            "small_batch_norm",
            Grade.HINT,
            call.lineno,
            f"batch normalisation takes its means over {batch // cut} samples, a microbatch of {batch} samples in "
            f"{cut}: they are noise",
            f"model = {script.weft}.convert_sync_batchnorm(model)  # before the wrap; or larger microbatches"
            if script.splits
            else "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        )


def rate_not_scaled(script: Script, training: Training) -> Iterator[Finding]:
    """The learning rate does not follow the batch, which grows with the copies."""
    if not script.copied or script.ending(*RATES) or not training.loops:
        return
    if _reckons_with_size(script):
        return
    for call in script.named("torch.optim.SGD"):
        rate = argument(call, 1, "lr")
        value = script.constant(rate)
        if rate is None or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        text = ast.unparse(rate)
        scaled = f"{script.weft}.dp_size()" if script.splits else "torch.distributed.get_world_size()"
        yield Finding(
            "rate_not_scaled",
            Grade.HINT,
            call.lineno,
            "a step sees the batches of all copies, and the rate of SGD should grow with them if it was found on one "
            "process",
            rewritten(call, ("params", "lr"), lr=f"{text} * {scaled}"),
        )


def spawned_without_guard(script: Script, training: Training) -> Iterator[Finding]:
    """A process that is started imports the script, and starts processes again."""
    spawning = any(
        script.constant(call.args[0]) == "spawn"
        for call in script.ending("set_start_method", "get_context")
        if call.args
    )
    for call in script.ending(*STARTERS):
        full = script.name(call.func)
        always = full == "torch.multiprocessing.spawn" and keyword(call, "start_method") is None
        if not (always or (spawning and ("multiprocessing" in full or "concurrent" in full))):
            continue
        if any(
            isinstance(each, ast.FunctionDef | ast.ClassDef | ast.If | ast.Lambda)
            for each in script.above(call)
        ):
            continue
        yield Finding(
            "spawned_without_guard",
            Grade.WRONG,
            call.lineno,
            "each process that this starts imports the script and comes to this line again, which Python refuses",
            f'if __name__ == "__main__": {ast.unparse(call)}',
        )


def _made(script: Script, node: ast.expr | None, user: ast.Call) -> ast.Call | None:
    """The call that has certainly made a model: the expression itself, or what its name was assigned last before."""
    if isinstance(node, ast.Call):
        return node
    function, values = script.function_of(user), script.assigned.get(dotted(node) or "", [])
    earlier = [
        each
        for each in values[:MOST_VALUES]
        if each is not None and each.lineno < user.lineno and script.function_of(each) is function
    ]
    last = max(earlier, key=lambda each: each.lineno, default=None)
    if len(values) > MOST_VALUES or not isinstance(last, ast.Call):
        return None
    return last if script.comes_after(user, last) else None


def _innermost(script: Script, node: ast.expr, call: ast.Call) -> str:
    return ast.unparse(node.args[0]) if isinstance(node, ast.Call) and node.args else ast.unparse(node)


def _reckons_with_size(script: Script) -> bool:
    """True if anything is computed from the number of copies."""
    return any(
        last_name(node) in SIZES and any(isinstance(each, ast.BinOp) for each in script.above(node))
        for node in script.nodes
    )
