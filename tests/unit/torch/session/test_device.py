"""What matrix products keep for each thread is given back with the turn."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.long import long

THREADS = """
import os, sys, threading
import torch
from weft.runtime.allocator import keep_memory, resident_bytes
from weft.torch.session.device import find_release

keep_memory(os.environ)
torch.set_num_threads(1)
leave = find_release() if sys.argv[1] == "given back" else lambda: None
x, grad, weight = torch.randn(512, 256), torch.randn(512, 1024), torch.randn(1024, 256)
y, found = torch.empty(512, 1024), torch.empty(1024, 256)

def work():
    for _ in range(2):
        torch.mm(x, weight.t(), out=y)
        torch.mm(grad.t(), x, out=found)
    leave()

def live(done):
    work()
    done.set()
    end.wait()

work()
end, before = threading.Event(), resident_bytes()
for _ in range(8):
    done = threading.Event()
    threading.Thread(target=live, args=(done,), daemon=True).start()
    done.wait()
print(resident_bytes() - before)
assert torch.allclose(found, grad.t() @ x)
end.set()
"""


def grown_bytes(how: str) -> int:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", THREADS, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@long
@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this PyTorch multiplies matrices without MKL"
)
def test_threads_that_take_turns_share_the_memory_in_which_products_pack():
    kept, given_back = grown_bytes("kept"), grown_bytes("given back")
    assert kept > 4 << 20, "MKL keeps memory for each of eight threads"
    assert given_back < kept / 4
