"""Python objects and tensors between ranks of any framework, between steps.

objects      the calls: send, recv_from, broadcast, allgather, barrier
handshake    how two ranks of a call find out that they mean the same, before anything is taken
messages     an object as a text and bytes, and back
serialise    Python values as JSON with tensors beside it; files of values are written by it, too

Tensors travel as those of torch. What a framework's own tensors are is said by `weft.session.travel.Travel`.
"""

import torch as _torch  # noqa: F401  before the files: the names for smdistributed import weft.torch then, which needs them
