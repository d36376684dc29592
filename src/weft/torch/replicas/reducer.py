"""Averages gradients over replicas while the backward pass still runs.

    step 1   all gradients are there      replicas agree on buckets, from the order of arrival; then reduce
    step 2+  a gradient arrives           counted; the last one of a step goes into its bucket
             a bucket is full             it leaves, if all before it have: several are in flight
             the step ends                what is left leaves; what was in flight is waited for and copied back

Only counting shows when a gradient has grown for the last time. A gradient grows once for each microbatch, and more
often if its parameter is used at several places. With a split backward pass it grows when its W runs.

    expected    a gradient grows as often as in the step with the most growth so far
    more often  its bucket has left already: the trailer says so on all replicas, and the bucket is averaged again,
                which is right, only later
    less often  its bucket waits for the end of the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import UsageError
from weft.reduce.bucket import Slot, assign
from weft.torch.backward.autograd import Arrival
from weft.torch.pytorch.private import at_end_of_backward
from weft.torch.replicas.buckets import AllReduceQueue, Bucket, Fused, InPlace, Sparse
from weft.torch.replicas.replica_agreement import SPARSE, Header, Votes

MIB = 1 << 20


@dataclass(frozen=True)
class ReducerOptions:
    """Options of the gradients' average.

    ``bucket_cap_mb``: MiB in a bucket. ``overlapping``: buckets leave as soon as they are full; otherwise at the end of
    the step. ``as_view``: gradients are views into the buckets. ``passes``: steps that add up before gradients are
    averaged. ``buffers``: after each step, buffers of the first replica that trained go to all others. ``outside``: a
    backward pass outside of a step counts as a step. ``fixed``: buckets follow the order of parameters, not of arrival.
    """

    bucket_cap_mb: float = 25.0
    overlapping: bool = True
    as_view: bool = False
    passes: int = 1
    buffers: bool = True
    outside: bool = True
    fixed: bool = False

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise UsageError(
                f"bucket_cap_mb is {self.bucket_cap_mb!r}: give a number of MiB above 0, for example 25"
            )
        if not isinstance(self.passes, int) or self.passes < 1:
            raise UsageError(
                f"backward_passes_per_step is {self.passes!r}: give a whole number of at least 1"
            )


class Reducer:
    """Averages the gradients of ``named`` parameters over the ranks of ``group``; all ranks make theirs together.

    A backward pass outside of a step is a step of its own, if the options allow that. It ends when autograd has ended.

    Args:
        named: All parameters of this rank's part by name; those that need no gradient at present are left out.
        queue: The way that flat tensors take.
        group: The group for buffers; nobody else uses it.
        votes: The small sums beside the gradients. Sparse gradients, which NCCL does not sum, go through its group.
        options: See :class:`ReducerOptions`.
        buffers: Gives this rank's buffers, when they are needed.
        announced: A context that reports that this rank waits; entered where no step has done so already.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        queue: AllReduceQueue,
        group: dist.ProcessGroup,
        votes: Votes,
        options: ReducerOptions,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        announced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.queue = queue
        self.votes = votes
        self.options = options
        self.divide_by_all = True
        self._everything = list(named)
        self.group = group
        self._buffers = buffers
        self._announced = announced
        self._buckets: list[Bucket] | None = None
        self._signature: tuple[Any, ...] = ()
        self._passes = 0
        self._suspended = 0
        self._active = False
        self._clock = 0
        self._trained: tuple[int, ...] = (0,)
        self._expected: dict[int, list[int]] = {}
        self._handles: list[Any] = []
        self._watch()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a model takes no part in its reductions: it has None here."""
        return type(None), ()

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self, microbatches: int = 1, outside: bool = False) -> None:
        """Begin a step of so many microbatches. ``outside``: a backward pass outside of a step has begun it."""
        if self._active and self._clock:
            raise UsageError(
                "an earlier step has failed while its gradients were averaged: the job cannot go on"
            )
        if self._suspended:
            return
        if not outside and self._signature != self._sign():
            self._watch()
        self._active = True
        self._microbatches = microbatches
        self._fresh = [parameter.grad is None for _, parameter in self._named]
        self._seen = [0] * len(self._named)
        self._last_arrival = [-1] * len(self._named)
        self._clock = 0
        self._launched = 0
        self._late: set[int] = set()
        self._remaining: list[int] | None = None
        expected = self._expected.get(microbatches)
        if self._buckets is None or expected is None or not self._due() or not self.options.overlapping:
            return
        self._remaining = expected.copy()
        for bucket in self._buckets:
            bucket.pending = sum(expected[member] > 0 for member in bucket.members)

    def wait_for_the_end(self) -> None:
        """Let the next step's gradients leave when that step ends, not before."""
        self._expected = {}

    def arrived(self, number: int) -> None:
        """Note that the gradient of parameter ``number`` has grown."""
        if not self._active:
            if self._suspended or not self.options.outside:
                return
            self.refuse_unseen()
            at_end_of_backward(self._finish_outside)
            self.begin(outside=True)
        self._seen[number] += 1
        self._last_arrival[number] = self._clock
        self._clock += 1
        if self._remaining is None:
            return
        if self._clock == 1:
            self.votes.start_header(trains=True, done=False, building=False)
        self._remaining[number] -= 1
        left = self._remaining[number]
        if left > 0:
            return
        bucket, place = self._where[number]
        if bucket.number < self._launched:
            self._came_late(bucket, number)
            return
        if isinstance(bucket, Fused):
            bucket.take(place, self.queue.scale)
        if left == 0:
            bucket.pending -= 1
            if bucket.number == self._launched and not bucket.pending:
                self._launch_full()

    def _finish_outside(self) -> None:
        with self._announced():
            self.finish()

    def finish(self, trained: bool = False) -> None:
        """End the step: when this returns, all replicas have the averages.

        ``trained``: there were gradients that somebody else averages.
        """
        if not self._active:
            return
        trains = any(self._seen) or trained
        if trains and not self._due():
            self._passes += 1
            self._active = False
            return
        self.votes.start_header(trains=trains, done=False, building=self._buckets is None)
        header = self.votes.header()
        if header.trains:
            self._passes = 0
            self._average(header)
            counts = self._expected.setdefault(self._microbatches, [0] * len(self._named))
            counts[:] = map(max, counts, self._seen)
        self._active = False

    def _refuse_taken(self, number: int) -> NoReturn:
        raise UsageError(
            f"a hook of the script takes the gradient of {self._named[number][0]} before replicas have averaged it, so "
            "each would train on its own samples: let the optimizer step after the step, or write "
            '"sharded_data_parallel_degree" and register hooks on parameters of weft.DistributedModel(...)'
        )

    def _due(self) -> bool:
        """True if this step's gradients are to be averaged, and not only summed."""
        return self._passes + 1 >= self.options.passes

    def _came_late(self, bucket: Bucket, number: int) -> None:
        if self.options.as_view and isinstance(bucket, Fused):
            raise UsageError(
                f"the gradient of {self._named[number][0]} grew after it was averaged, because this step uses the "
                "parameter more often than those before: make the model with gradient_as_bucket_view=False, or "
                "with overlapping_allreduce=False"
            )
        self._late.add(bucket.number)

    def _launch_full(self) -> None:
        assert self._buckets is not None
        for bucket in self._buckets[self._launched :]:
            if bucket.pending or not bucket.may_leave():
                return
            bucket.launch(self.queue, self._fresh)
            self._launched += 1

    def _average(self, header: Header, joined: bool = False) -> None:
        """Send buckets that have not left yet, wait for all, and hand the averages out."""
        if self._buckets is None:
            self._build(header.trains[0])
        assert self._buckets is not None
        for bucket in self._buckets[self._launched :]:
            bucket.launch(self.queue, self._fresh)
        found = [not joined and parameter.grad is not None for _, parameter in self._named]
        for bucket in self._buckets:
            for member in bucket.missing_gradients():
                found[member] = True
        for number, seen in enumerate(self._seen if not joined else ()):
            if seen and not found[number]:
                self._refuse_taken(number)
        present, late = self.votes.trailer(found, [bucket.number in self._late for bucket in self._buckets])
        replicas = self.votes.replicas
        factor = 1.0 if self.divide_by_all else replicas / (replicas - header.done)
        for bucket, again in zip(self._buckets, late, strict=True):
            bucket.wait()
            if again:
                bucket.launch(self.queue, self._fresh)
        for bucket, again in zip(self._buckets, late, strict=True):
            if again:
                bucket.wait()
            bucket.give([0] * len(present) if joined else present, factor)
        self._trained = header.trains
        self._share_buffers(header.trains[0])

    # --- buckets ----------------------------------------------------------------------------------------------

    def _sign(self) -> tuple[Any, ...]:
        return tuple((p.requires_grad, p.dtype, p.device) for _, p in self._everything)

    def watch(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Average these parameters from now on; every replica calls this before the same step."""
        self._everything = list(named)
        self._watch()

    def _watch(self) -> None:
        """Watch the parameters that need gradients; buckets are made at the end of the next step."""
        self.close()
        self._signature = self._sign()
        self._named = [(name, p) for name, p in self._everything if p.requires_grad]
        self._buckets = None
        self._expected = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(Arrival(self, number))
            for number, (_, parameter) in enumerate(self._named)
        ]

    def refuse_unseen(self) -> None:
        """Refuse gradients that nobody averages.

        There are such gradients if ``requires_grad`` was set and then modules inside of the model were called, but not
        the model itself.

        Raises:
            UsageError: A gradient has grown that is not watched.
        """
        if self._signature == self._sign():
            return
        watched = {id(parameter) for _, parameter in self._named}
        unseen = [name for name, p in self._everything if p.requires_grad and id(p) not in watched]
        if any(p.grad is not None for name, p in self._everything if name in unseen):
            raise UsageError(
                f"{unseen[0]} needs gradients since the model was called the last time, and replicas do not average "
                "them: after requires_grad was changed call the model itself, not a module inside of it, or call it "
                "in a weft.step"
            )

    def _build(self, source: int) -> None:
        """Make the same buckets on all replicas; collective. ``source``: the replica whose order of arrival counts."""
        self.votes.check_alike(self._named)
        kinds = self.votes.agree_on_kinds(self._named)
        arrived = sorted(
            range(len(self._named)),
            key=lambda n: (self._last_arrival[n] < 0, 0 if self.options.fixed else self._last_arrival[n], -n),
        )
        order = self.votes.agree_on_order(arrived, source)
        slots = [
            Slot(p.numel(), p.element_size(), (p.dtype, p.device), kind == SPARSE)
            for (_, p), kind in zip(self._named, kinds, strict=True)
        ]
        self.queue.forget()
        self._buckets = []
        self._where: dict[int, tuple[Bucket, int]] = {}
        for number, (members, sparse) in enumerate(
            assign(slots, order, int(self.options.bucket_cap_mb * MIB))
        ):
            parameters = [self._named[member][1] for member in members]
            size_bytes = sum(parameter.nbytes for parameter in parameters)
            sums = None if sparse or self.options.as_view else self.queue.in_place(size_bytes)
            bucket: Bucket
            if sparse:
                bucket = Sparse(number, members, parameters[0], self.votes.group)
            elif sums is not None:
                bucket = InPlace(number, members, parameters, sums)
            else:
                bucket = Fused(number, members, parameters, self.options.as_view)
            self._buckets.append(bucket)
            self._where |= {member: (bucket, place) for place, member in enumerate(members)}

    @torch.no_grad()
    def _share_buffers(self, source: int) -> None:
        """Give all replicas the buffers of replica ``source``."""
        if not self.options.buffers:
            return
        kinds: dict[Any, list[Tensor]] = {}
        for buffer in self._buffers():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for same in kinds.values():
            flat = torch.cat([buffer.flatten() for buffer in same])
            dist.broadcast(flat, dist.get_global_rank(self.group, source), group=self.group)
            if self.votes.replica != source:
                for buffer, part in zip(same, flat.split([b.numel() for b in same]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def use(self, queue: AllReduceQueue) -> None:
        """Average through ``queue`` from the next step on; every replica calls this before the same step."""
        self.queue = queue
        self._watch()

    def describe_bucket(self, number: int) -> tuple[list[Tensor], list[nn.Parameter], bool]:
        """A dense bucket's gradients as views, its parameters, and whether it is the last."""
        assert self._buckets is not None
        bucket = self._buckets[number]
        assert isinstance(bucket, Fused)
        return bucket.views, bucket.parameters, bucket is self._buckets[-1]

    # --- more or fewer steps than others ------------------------------------------------------------------------

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Inside, steps add gradients up and average nothing."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def shadow(self) -> int:
        """Take part in the others' steps without a batch until nobody has a batch; the replica that trained last."""
        while True:
            self.votes.start_header(trains=False, done=True, building=False)
            header = self.votes.header()
            if header.done == self.votes.replicas:
                return self._trained[0]
            if header.trains:
                if self._buckets is None:
                    raise UsageError("a replica had no batch for the first step: give each at least one")
                self._launched, self._late, self._fresh = 0, set(), []
                with without_gradients([parameter for _, parameter in self._named]):
                    self._average(header, joined=True)

    def close(self) -> None:
        """Stop watching gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@contextmanager
def without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, these parameters have no gradient."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
