"""A mini-batch, cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from weft.check.finding import Finding, Grade
from weft.rules.replicas import SmallBatchNorm
from weft.torch.example_graph import Example
from weft.torch.tensors.nested import tensors_in
from weft.untrusted import listed

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch(example: Example, microbatches: int, line: int) -> Iterator[Finding]:
    """Findings about the mini-batch: microbatches that do not divide it, few samples for batch normalisation.

    Args:
        example: The model and what it is called with; it is not run.
        microbatches: Into how many the mini-batch is cut.
        line: Where in the script the example is.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(example.batch) if tensor.dim()}
    batch = sizes.pop() if len(sizes) == 1 else None
    if batch is None:
        return
    if batch % microbatches:
        better = max(1, batch // microbatches) * microbatches
        yield Finding(
            "batch_not_divided",
            Grade.WRONG,
            line,
            f"a batch of {batch} samples is refused, since {microbatches} microbatches do not divide it",
            f"{better} samples; or @weft.step(allow_uneven=True)",
        )
    norms = [name for name, module in example.model.named_modules() if isinstance(module, NORMS)]
    least = SmallBatchNorm().least
    if norms and batch // microbatches < least:
        yield Finding(
            "small_batch_norm",
            Grade.HINT,
            line,
            f"batch normalisation ({listed(norms, 3)}) takes its means over {batch // microbatches} samples, "
            f"a microbatch of {batch} samples in {microbatches}: they are noise",
            "model = weft.convert_sync_batchnorm(model)  # before the wrap; or larger microbatches",
        )
