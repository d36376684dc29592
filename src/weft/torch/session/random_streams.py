"""Random states: the same for glue on every rank, their own for what runs on one rank only.

Each microbatch has a stream of its own, seeded from the step's seed and its index, and swapped in whenever its
turn comes; so glue draws the same numbers on every rank, in whatever order the ranks run their microbatches.
What runs on one rank only (a unit, glue on a placed tensor) and draws numbers does so from a stream
seeded from the step, the microbatch, its name and how many calls of that name have drawn, and leaves the glue's
stream alone. So dropout masks depend on the seed, not on which rank happens to run a unit.

Where a step sets a seed itself (``torch.manual_seed``), all draws after that in the microbatch come from the one stream
that one process would have: whoever has drawn sends the others how far the stream is.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weft.transport.tensor_bytes import to_bytes

TORCH, PYTHON, NUMPY = 1, 2, 4


def mix(*parts: int | str) -> int:
    """A 63-bit seed from its parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def call_seed(seed: int, microbatch: int, name: str, drawn: Mapping[str, int]) -> int:
    """The seed of a call with a stream of its own; ``drawn``: how many of each name drew before in its microbatch."""
    return mix(seed, microbatch, name, drawn.get(name, 0) + 1)


class Streams:
    """The random generators of this process that a training step may use.

    ``device``: its CUDA generator is kept beside the CPU's. ``numpy``: whether NumPy's global state is kept too
    (it is slow to swap, so only programs that draw from it in glue pay for it).
    """

    def __init__(self, device: torch.device, numpy: bool = False) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.numpy = numpy

    def _numpy(self, which: int) -> Any:
        """``numpy.random`` if its state counts and the program uses NumPy at all.

        NumPy loads it where it is first used. It is loaded here, or doing so later would look as if numbers were drawn.
        """
        numpy = sys.modules.get("numpy") if which & NUMPY or self.numpy else None
        return None if numpy is None else numpy.random

    def capture(self, which: int = TORCH | PYTHON) -> Any:
        """The present states of the streams named in ``which``."""
        torch_states = [generator.get_state() for generator in self._generators] if which & TORCH else None
        python_state = random.getstate() if which & PYTHON else None
        numpy = self._numpy(which)
        return torch_states, python_state, numpy.get_state() if numpy is not None else None

    def restore(self, states: Any) -> None:
        """Go on with states that :meth:`capture` gave; streams that it left out stay as they are."""
        torch_states, python_state, numpy_state = states
        if torch_states is not None:
            for generator, state in zip(self._generators, torch_states, strict=True):
                generator.set_state(state)
        if python_state is not None:
            random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy.random"].set_state(numpy_state)

    def check(self, states: Any) -> None:
        """Any error if :meth:`restore` could not take these states; no stream has changed then."""
        torch_states, python_state, numpy_state = states
        if torch_states is not None:
            for generator, state in zip(self._generators, torch_states, strict=True):
                torch.Generator(generator.device).set_state(state)
        if python_state is not None:
            random.Random().setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy.random"].RandomState().set_state(numpy_state)

    def seed(self, seed: int, which: int = TORCH | PYTHON) -> None:
        """Begin the streams named in ``which`` anew."""
        if which & TORCH:
            for generator in self._generators:
                generator.manual_seed(seed)
        if which & PYTHON:
            random.seed(seed)
        numpy = self._numpy(which)
        if numpy is not None:
            numpy.seed(seed % 2**32)

    def has_drawn_since(self, seed: int, which: int = TORCH | PYTHON) -> bool:
        """True if a number was drawn since the streams were seeded with ``seed``. The streams are used up afterwards.

        For Python's generator the next number decides: its whole state would be a tuple of 625 numbers.
        """
        found, number = self.capture(which & ~PYTHON), random.getrandbits(64)
        self.seed(seed, which)
        return not same_states(found, self.capture(which & ~PYTHON)) or random.getrandbits(64) != number

    def is_seeded_anew(self, seed: int) -> bool:
        """True if somebody has set another seed than ``seed`` (``torch.manual_seed``) since it was set here."""
        return any(generator.initial_seed() != seed for generator in self._generators)

    def to_text(self) -> str:
        """PyTorch's present states, for :meth:`take` on another rank."""
        return " ".join(to_bytes(generator.get_state()).hex() for generator in self._generators)

    def take(self, text: str) -> None:
        """Go on with states that :meth:`to_text` gave."""
        states = [torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in text.split()]
        self.restore((states, None, None))

    def draw(self) -> int:
        """A step's seed, drawn from the caller's stream, which moves on by this one number."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator).item())

    @contextmanager
    def own(self, seed: int, which: int) -> Iterator[None]:
        """Inside, numbers come from a stream of its own; the present stream is as before afterwards."""
        before = self.capture(which)
        self.seed(seed, which)
        try:
            yield
        finally:
            self.restore(before)


def same_states(one: Any, other: Any) -> bool:
    """True if two captured states are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)) and not isinstance(one[0], (int, float)):
        return len(one) == len(other) and all(same_states(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
