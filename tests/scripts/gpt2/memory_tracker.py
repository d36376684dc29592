"""What the GPU holds, and how much of it."""

import gc

import smdistributed.modelparallel.torch as smp
import torch

_GB = 1024**3


def memory_status(msg="", reset_max=True, sync=True):
    rank, tp_rank, pp_rank = smp.rank(), smp.tp_rank(), smp.pp_rank()
    if sync:
        torch.cuda.synchronize()
    alloced = torch.cuda.memory_allocated(device=smp.local_rank())
    max_alloced = torch.cuda.max_memory_allocated(device=smp.local_rank())
    cached = torch.cuda.memory_reserved(device=smp.local_rank())
    max_cached = torch.cuda.max_memory_reserved(device=smp.local_rank())
    # convert to GB for printing
    alloced, cached, max_alloced, max_cached = (n / _GB for n in (alloced, cached, max_alloced, max_cached))
    print(
        f"[{msg}] rank {rank} tp {tp_rank} pp {pp_rank} TORCH {torch.__version__} device={torch.cuda.current_device()}",
        f"alloc {alloced:0.4f} ({max_alloced:0.4f}) cache {cached:0.4f} ({max_cached:0.4f})",
    )
    if reset_max:
        torch.cuda.reset_max_memory_cached()
        torch.cuda.reset_max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return alloced, max_alloced, cached, max_cached


def memory_status_cpu(msg=""):
    import psutil

    rss = psutil.Process().memory_info().rss / _GB
    usage = sum(smp.allgather(rss, smp.WORLD))
    if smp.rank() == 0:
        print(f"[{msg}] {psutil.virtual_memory().percent}% used on the host, {usage:0.3f} GB by this job")


def alive_on_gpu():
    gc.collect()
    found = 0
    for obj in gc.get_objects():
        if torch.is_tensor(obj) and obj.is_cuda and obj.device.index == smp.local_rank():
            found += obj.numel() * obj.element_size()
    stats = torch.cuda.memory_stats(smp.local_rank())
    return found, stats.get("allocated_bytes.all.peak", 0), stats["num_alloc_retries"]
