"""Runs a script as if each rank had a GPU of its own: `own_gpus.py SCRIPT ARGUMENTS`.

The ranks share one, and NCCL, which refuses that, takes them for ranks on different hosts: what they send each other
goes through sockets. All else is as on a machine with a GPU for each.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    own = f"the GPU of rank {os.environ['RANK']}"
    os.environ.update(NCCL_HOSTID=own, NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")

    from weft.torch.session import device

    device.gpu_of = lambda device: own
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
