"""The states of an optimizer outside of the device: in each step they come by buckets, are updated, and go again.

An optimizer that updates each parameter for itself may be called for some parameters after the others: those of a
bucket have their gradients, all others have none meanwhile. So every optimizer of ``torch.optim`` but LBFGS computes
the same as in one call. This is the optimizer part of ZeRO-Offload (Ren et al., arXiv 2101.06840), with the update on
the device and not on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.torch.offload.host_memory import HostMemory, tensor_in
from weft.torch.offload.partial_steps import gradients_apart, in_calls
from weft.torch.tensors.shards import stays_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 32 << 20
"""The most bytes of parameters in a bucket, unless one has more."""
LEAST_BYTES = 64 << 10
"""A state below this stays: a step counter, the states of a bias."""


class OffloadedStates:
    """The states of one optimizer outside of ``device``.

    Between two steps ``optimizer.state`` has them as tensors of host memory, so they can be read and saved as ever.

    ``copies``: they are copied to the device for the update, and back; False where the device reads host memory itself.
    ``setting``: what they wait for. With ``offload_weights`` they stay, and weights alone come and go by buckets.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, copies: bool | None = None,
        setting: str = "offload_optimizer",
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._device, self._setting = device, setting
        self._memory = HostMemory(device)
        self._copies = device.type != "cpu" if copies is None else copies
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._homes: dict[tuple[int, str], Tensor] = {}
        """By a parameter's id and the name of a state, where the state lies."""

    @torch.no_grad()
    def step(self) -> Any:
        """The optimizer's step, bucket by bucket; what the first call of its ``step()`` gives."""
        with in_calls(self._optimizer, self._setting) as call:
            weights = [weight for weight in _weights(self._optimizer) if weight.grad is not None]
            with gradients_apart(weights) as grads:
                result = self._update(_buckets(weights), grads, call)
        self._finish()
        held = {id(weight) for weight in self._optimizer.state}
        self._homes = {key: home for key, home in self._homes.items() if key[0] in held}
        return result

    def _update(
        self, buckets: Sequence[Sequence[Tensor]], grads: Mapping[int, Tensor | None], call: Callable[[], Any]
    ) -> Any:
        """Update the parameters of one bucket after the other, whose gradients are given by their ids."""
        results = []
        self._fetch(buckets[0])
        for number, bucket in enumerate(buckets):
            if number + 1 < len(buckets):
                self._fetch(buckets[number + 1])
            self._await()
            for weight in bucket:
                weight.grad = grads[id(weight)]
            results.append(call())
            for weight in bucket:
                weight.grad = None
            self.put_away(bucket)
        return results[0]

    @torch.no_grad()
    def load(self, content: Mapping[str, Any]) -> None:
        """The optimizer's ``load_state_dict()``, by buckets: the device never holds all states."""
        optimizer, states = self._optimizer, content["state"]
        weights = _weights(optimizer)
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        rest = {number: entry for number, entry in states.items() if number not in range(len(weights))}
        loaded: dict[Any, Any] = {}
        for bucket in _buckets(weights):
            own = [numbers[id(weight)] for weight in bucket]
            some = {number: states[number] for number in own if number in states}
            optimizer.load_state_dict({**content, "state": {**rest, **some}})
            self.put_away(bucket)
            loaded.update(optimizer.state)
        optimizer.state.update(loaded)
        self._finish()

    def _fetch(self, bucket: Sequence[Tensor]) -> None:
        """Begin to bring states to the device."""
        for weight in bucket:
            entry = self._optimizer.state.get(weight, {})
            for name, value in entry.items():
                home = self._homes.get((id(weight), name))
                if self._copies and isinstance(value, Tensor) and stays_sharded(value):
                    entry[name] = value.to(self._device)
                    continue
                if home is None or not _is_at(value, home):
                    continue
                if self._copies:
                    entry[name] = self._copied(value)
                else:
                    self._memory.page_in(home.untyped_storage())

    def _copied(self, value: Tensor) -> Tensor:
        if self._stream is None:
            return value.clone()
        with torch.cuda.stream(self._stream):
            copy = value.to(self._device, non_blocking=True)
        _local(copy).record_stream(torch.cuda.current_stream(self._device))
        return copy

    def _await(self) -> None:
        """Wait until what was fetched is there; copies for the next bucket go on while this one is updated."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _finish(self) -> None:
        """Whoever reads the states from now on finds them whole."""
        if self._stream is not None:
            self._stream.synchronize()

    def put_away(self, bucket: Sequence[Tensor]) -> None:
        """Bring the states of these parameters to where they wait."""
        if self._setting != "offload_optimizer":
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for weight in bucket:
            entry = self._optimizer.state.get(weight, {})
            for name, value in entry.items():
                if (
                    isinstance(value, Tensor)
                    and value.layout == torch.strided
                    and _local(value).nbytes >= LEAST_BYTES
                ):
                    entry[name] = self._put(weight, name, value)

    def _put(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """The state where it waits; DTensor has no way to take a shard that lies in pinned memory."""
        if self._copies and stays_sharded(value):
            return value.to("cpu")
        local, key = _local(value), (id(weight), name)
        home = self._homes.get(key)
        if home is None or home.shape != local.shape or home.dtype != local.dtype:
            home = self._homes[key] = tensor_in(self._memory.take(local.nbytes), local)
        if not _is_at(value, home):
            if self._stream is None:
                home.copy_(local)
            else:
                with torch.cuda.stream(self._stream):
                    home.copy_(local, non_blocking=True)
                local.record_stream(self._stream)
            value = _with_local(value, home)
        self._memory.page_out(home.untyped_storage())
        return value


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _buckets(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in order, in lists of at most so many bytes; one at least."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for weight in weights:
        nbytes = _local(weight).nbytes
        if buckets[-1] and size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(weight)
        size += nbytes
    return buckets


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor."""
    return cast("DTensor", tensor).to_local() if stays_sharded(tensor) else tensor


def _is_at(value: Any, home: Tensor) -> bool:
    return isinstance(value, Tensor) and _local(value).data_ptr() == home.data_ptr()


def _with_local(value: Tensor, local: Tensor) -> Tensor:
    """A tensor like ``value`` whose data, or this rank's shard of it, is ``local``."""
    if not stays_sharded(value):
        return local
    sharded = cast("DTensor", value)
    return type(sharded).from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape,
        stride=sharded.stride(),
    )  # fmt: skip
