"""Data loaders: what each replica reads, and what is left over at the end of an epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.check.finding import Finding, Grade
from weft.check.ranks import differs_in_pipeline, ranks_in, shards
from weft.check.script import Script, argument, dotted, keyword, last_name, rewritten
from weft.check.training import Loader, Training

LOADER = (
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last",
)  # fmt: skip
"""The arguments of a `DataLoader` by position."""
DEFAULT_WORKERS = 4
"""Advised for a process, where the machine has cores for them."""
IN_MEMORY = ("TensorDataset", "list", "range", "rand", "randn", "zeros", "ones", "tensor", "arange")
"""Makers of data that takes no work to read."""
DECODED = (
    "ImageFolder", "DatasetFolder", "ImageNet", "CIFAR10", "CIFAR100", "CocoDetection", "CocoCaptions", "VOCDetection",
    "VOCSegmentation", "Food101", "StanfordCars", "CelebA", "Cityscapes", "Kinetics", "UCF101", "LIBRISPEECH",
)  # fmt: skip
"""Datasets of torchvision and torchaudio that decode a file for each sample, or transform a picture."""
SAMPLERS = ("DistributedSampler", "shared_sampler")


def uneven_last_batch(script: Script, training: Training) -> Iterator[Finding]:
    """The last batch of an epoch is smaller, and microbatches may not divide it."""
    for loader in training.loaders:
        trained = [step for step in loader.steps if step.trains]
        cut = script.microbatches
        if cut == 1 or not trained or any(step.uneven for step in trained) or not loader.plain:
            continue
        if loader.says("drop_last") or argument(loader.call, 4, "batch_sampler") is not None:
            continue
        left = _left_over(script, loader)
        if left == 0 or (left is not None and cut is not None and left % cut == 0):
            continue
        ends = not any(isinstance(node, ast.Break) for node in ast.walk(loader.loop))
        certain = left is not None and cut is not None and loader.sampler is None and ends
        yield Finding(
            "uneven_last_batch",
            Grade.WRONG if certain else Grade.HINT,
            loader.call.lineno,
            f"the last batch of an epoch has {'what is left of the samples' if left is None else f'{left} samples'}, "
            f"and a step that trains refuses a batch that {cut or 'its'} microbatches do not divide",
            rewritten(loader.call, LOADER, drop_last="True"),
        )


def batch_not_divided(script: Script, training: Training) -> Iterator[Finding]:
    """Microbatches do not divide the batch."""
    for loader in training.loaders:
        batch, cut = script.whole(loader.batch_size), script.microbatches
        trained = [step for step in loader.steps if step.trains]
        if batch is None or cut is None or not trained or any(step.uneven for step in trained):
            continue
        if batch % cut:
            better = str(max(1, batch // cut) * cut)
            yield Finding(
                "batch_not_divided",
                Grade.WRONG,
                loader.call.lineno,
                f"a batch of {batch} samples is refused, since {cut} microbatches do not divide it",
                rewritten(loader.call, LOADER, batch_size=better),
            )


def loader_not_sharded(script: Script, training: Training) -> Iterator[Finding]:
    """Every replica reads the same data."""
    if script.copied is False or shards(script) or script.ending(*SAMPLERS):
        return
    for loader in training.loaders:
        if loader.sampler is not None or not loader.plain or _reads_by_itself(script, loader):
            continue
        data = ast.unparse(loader.dataset) if loader.dataset is not None else "dataset"
        own = f"num_replicas={script.weft}.dp_size(), rank={script.weft}.dp_rank()" if script.splits else ""
        sampler = f"torch.utils.data.distributed.DistributedSampler({', '.join(filter(None, (data, own)))})"
        yield Finding(
            "loader_not_sharded",
            Grade.WRONG if script.copied else Grade.HINT,
            loader.call.lineno,
            "every replica reads all of the data, so replicas learn the same thing several times"
            + ("" if script.copied else ", as soon as there are copies"),
            rewritten(loader.call, LOADER, without=("shuffle",), sampler=sampler),
        )


def sampler_by_rank(script: Script, training: Training) -> Iterator[Finding]:
    """The ranks of one pipeline read different data."""
    if not script.splits or script.partitions == 1 or (script.settings or {}).get("inputs"):
        return
    for call in script.ending("DistributedSampler"):
        ranks = argument(call, 2, "rank")
        if ranks is not None and not differs_in_pipeline(script, ranks):
            continue
        if any(each.arg is None for each in call.keywords):
            continue
        yield Finding(
            "sampler_by_rank",
            Grade.WRONG if script.partitions else Grade.HINT,
            call.lineno,
            "the ranks of one pipeline have to read the same batch, and this sampler gives each process another one",
            rewritten(
                call,
                ("dataset", "num_replicas", "rank"),
                num_replicas=f"{script.weft}.dp_size()",
                rank=f"{script.weft}.dp_rank()",
            ),
        )


def sampler_without_epoch(script: Script, training: Training) -> Iterator[Finding]:
    """A sampler shuffles alike in every epoch."""
    if script.ending("set_epoch"):
        return
    for loader in training.loaders:
        made = script.value(loader.sampler)
        if not isinstance(made, ast.Call) or last_name(made.func) not in SAMPLERS or loader.sampler is None:
            continue
        shuffle = keyword(made, "shuffle")
        epochs = script.loop_of(loader.loop)
        if not isinstance(epochs, ast.For) or (isinstance(shuffle, ast.Constant) and not shuffle.value):
            continue
        if made is loader.sampler or script.loop_of(made) is not None:
            continue
        counter = epochs.target.id if isinstance(epochs.target, ast.Name) else "epoch"
        yield Finding(
            "sampler_without_epoch",
            Grade.WRONG,
            epochs.lineno,
            "the sampler shuffles by its epoch, which nobody sets, so every epoch has the same order",
            f"{ast.unparse(loader.sampler)}.set_epoch({'epoch' if counter == '_' else counter})",
        )


def workers_compete(script: Script, training: Training) -> Iterator[Finding]:
    """The loaders' workers are more than the machine has cores."""
    ranks, cores = script.given.ranks, script.given.cores
    if ranks is None or cores is None:
        return
    for loader in training.loaders:
        workers = script.whole(keyword(loader.call, "num_workers"))
        if workers is not None and workers * ranks > cores:
            yield Finding(
                "workers_compete",
                Grade.SLOW,
                loader.call.lineno,
                f"{ranks} ranks with {workers} workers each are {ranks * workers} processes that prepare data, "
                f"on {cores} cores that also train",
                rewritten(loader.call, LOADER, num_workers=str(cores // ranks)),
            )


def loader_without_workers(script: Script, training: Training) -> Iterator[Finding]:
    """The process that drives the GPU also reads and prepares its samples."""
    cores, ranks = script.given.cores, script.given.ranks
    workers = min(DEFAULT_WORKERS, cores // ranks - 1) if cores and ranks else DEFAULT_WORKERS
    for loader in training.loaders if script.uses_gpu and workers > 0 else ():
        if (
            not loader.plain
            or argument(loader.call, 5, "num_workers") is not None
            or _in_memory(script, loader)
        ):
            continue
        made = script.value(loader.dataset)
        decodes = isinstance(made, ast.Call) and last_name(made.func) in DECODED
        yield Finding(
            "loader_without_workers",
            Grade.SLOW if decodes else Grade.HINT,
            loader.call.lineno,
            "each step waits while this process reads and prepares its batch"
            + ("" if decodes else ", which costs where a sample is read from a file, decoded or tokenised"),
            rewritten(loader.call, LOADER, num_workers=str(workers)),
        )


def copy_not_pinned(script: Script, training: Training) -> Iterator[Finding]:
    """Batches are copied to the GPU from memory that the system may move."""
    for loader in training.loaders if script.uses_gpu else ():
        if (
            not loader.plain
            or argument(loader.call, 7, "pin_memory") is not None
            or isinstance(loader.loop, ast.While)
        ):
            continue
        batch = _names_of_batch(loader.loop)
        for call in ast.walk(loader.loop):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in ("to", "cuda") and dotted(call.func.value) in batch:
                yield Finding(
                    "copy_not_pinned",
                    Grade.HINT,
                    loader.call.lineno,
                    f"{ast.unparse(call)} waits for its copy, which pinned memory would let run beside the GPU's work",
                    f"{rewritten(loader.call, LOADER, pin_memory='True')}  # and in line {call.lineno} "
                    f"{rewritten(call, non_blocking='True')}",
                )
                break


def _names_of_batch(loop: ast.For | ast.AsyncFor) -> set[str]:
    """The names of a batch and of its parts in a loop, also in `{k: x.to(device) for k, x in batch.items()}`."""
    names = {key for each in ast.walk(loop.target) if (key := dotted(each))}
    for each in ast.walk(loop):
        if isinstance(each, ast.comprehension) and names & {dotted(part) for part in ast.walk(each.iter)}:
            names |= {key for part in ast.walk(each.target) if (key := dotted(part))}
    return names


def _in_memory(script: Script, loader: Loader) -> bool:
    """True if samples only have to be picked: a dataset of tensors, or a list."""
    made = script.value(loader.dataset)
    return isinstance(made, ast.List | ast.ListComp | ast.Tuple) or (
        isinstance(made, ast.Call) and last_name(made.func) in IN_MEMORY
    )


def _left_over(script: Script, loader: Loader) -> int | None:
    """Samples of the last batch, if it is a smaller one; None if the script does not say."""
    batch, samples = script.whole(loader.batch_size), _samples(script, loader.dataset)
    return samples % batch if batch is not None and samples is not None else None


def _samples(script: Script, data: ast.expr | None) -> int | None:
    """The length of a dataset that is made of a tensor of known size, or of a range."""
    for _ in range(3):
        made = script.value(data)
        if not isinstance(made, ast.Call) or not made.args:
            return None
        if last_name(made.func) in ("randn", "rand", "zeros", "ones", "range"):
            alone = last_name(made.func) != "range" or len(made.args) == 1
            return script.whole(made.args[0]) if alone else None
        if last_name(made.func) not in ("TensorDataset", "list"):
            return None
        data = made.args[0]
    return None


def _reads_by_itself(script: Script, loader: Loader) -> bool:
    """True if the dataset may know which part to read: an iterable one, or one of a call that gets the rank."""
    made = script.value(loader.dataset)
    if not isinstance(made, ast.Call):
        return False
    name = last_name(made.func)
    bases = [
        last_name(base)
        for node in script.nodes
        if isinstance(node, ast.ClassDef) and node.name == name
        for base in node.bases
    ]
    return "IterableDataset" in bases or bool(ranks_in(made))
