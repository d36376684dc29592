"""GPT-NeoX with bf16 or fp32, activation checkpoints of layers, a cosine schedule, and gradient accumulation."""

import argparse
import json
import logging
import math
import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, GPTNeoXConfig, get_scheduler, set_seed

logging.basicConfig(level=logging.getLevelName("INFO"), handlers=[logging.StreamHandler(sys.stdout)])
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class Throughput(object):
    """Samples a second, by CUDA events."""

    def __init__(self):
        self.start = torch.cuda.Event(enable_timing=True)
        self.stop = torch.cuda.Event(enable_timing=True)
        self.samples = 0

    def __enter__(self):
        torch.cuda.current_stream().synchronize()
        self.start.record(torch.cuda.current_stream())
        return self

    def __exit__(self, *exc):
        self.stop.record(torch.cuda.current_stream())
        self.stop.synchronize()
        self.rate = self.samples / max(self.start.elapsed_time(self.stop), 1e-6) * 1000


class Bytes(Dataset):
    def __init__(self, args, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        starts = rng.integers(args.vocab_size, size=(args.samples, 1))
        self.tokens = ((starts + 3 * np.arange(args.context)) % args.vocab_size).astype(np.int64)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], np.ones_like(self.tokens[i])


def build_loader(args, split):
    dataset = Bytes(args, split)
    sampler = DistributedSampler(dataset, smp.dp_size(), smp.dp_rank(), shuffle=False, drop_last=True)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=args.train_batch_size if split == "train" else args.val_batch_size,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
        persistent_workers=args.workers > 0,
    )


@smp.step()
def train_step(model, optimizer, input_ids, attention_mask, accumulate):
    with nullcontext():
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids, use_cache=False)[0]
    loss = loss / accumulate
    model.backward(loss)
    return loss


@smp.step(detach_outputs=True)
def val_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids, use_cache=False)[
        "loss"
    ]


def validate(model, loader):
    model.eval()
    losses = []
    for input_ids, attention_mask in loader:
        with torch.no_grad():
            losses.append(val_step(model, input_ids, attention_mask).reduce_mean())
    loss = torch.stack(losses).mean().cuda()
    if smp.dp_size() > 1:
        dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=smp.get_dp_process_group())
        loss = loss / smp.dp_size()
    model.train()
    return loss.item()


def main(args):
    if dist.is_initialized():
        raise RuntimeError("somebody was here before")
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "microbatches": args.microbatches,
            "active_microbatches": args.microbatches,
            "optimize": "speed",
            "pipeline": args.schedule,
            "memory_weight": 0.5,
            "prescaled_batch": False,
            "shard_optimizer_state": args.shard_optimizer_state,
            "activation_loading_horizon": 2,
            "offload_activations": False,
            "_fp32_grad_accumulation": True,
        }
    )
    assert dist.is_available() and dist.is_initialized()
    assert dist.get_world_size() == smp.size() and dist.get_rank() == smp.rank(), (
        dist.get_world_size(),
        smp.size(),
    )
    torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", 0))))
    if smp.rank() == 0:
        logger.info("args %s", json.dumps(vars(args)))
        logger.info(
            "%s on %s", torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        )
    set_seed(args.seed + smp.tp_rank())

    config = GPTNeoXConfig(
        vocab_size=args.vocab_size, hidden_size=32, num_hidden_layers=args.layers, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=args.context, use_parallel_residual=True,
        rotary_pct=0.25, use_cache=False,
    )  # fmt: skip
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1), smp.delay_param_initialization(enabled=False):
        model = AutoModelForCausalLM.from_config(config)
    num_params = np.sum([np.prod(p.size()) for p in model.parameters()])
    model = smp.DistributedModel(
        model,
        trace_device="gpu",
        backward_passes_per_step=args.gradient_accumulation,
        overlapping_allreduce=args.gradient_accumulation == 1,
        bucket_cap_mb=25,
        gradient_as_bucket_view=True,
    )
    if args.ckpt_layers:
        for c in model.get_module().gpt_neox.layers:
            smp.set_activation_checkpointing(c)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        fused=False,
    )
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=args.max_steps)

    train_loader, val_loader = build_loader(args, "train"), build_loader(args, "val")
    step, micro = 0, 0
    running = torch.zeros(1, device="cuda")
    timers = {}
    for epoch in range(math.ceil(args.max_steps * args.gradient_accumulation / len(train_loader))):
        train_loader.sampler.set_epoch(epoch)
        for input_ids, attention_mask in train_loader:
            began = time.time()
            if micro % args.gradient_accumulation == 0:
                optimizer.zero_grad(set_to_none=True)
            with Throughput() as throughput:
                loss_mb = train_step(model, optimizer, input_ids, attention_mask, args.gradient_accumulation)
                throughput.samples = len(input_ids)
            running += loss_mb.reduce_mean().detach()
            micro += 1
            if micro % args.gradient_accumulation:
                continue
            total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            scheduler.step()
            step += 1
            timers["step"] = time.time() - began
            dist.all_reduce(running, group=smp.get_dp_process_group())
            running /= smp.dp_size()
            if smp.rank() == 0:
                logger.info(
                    "(%d) Loss: %.6f, norm: %.5f, lr: %.3e, %s", step, running.item(), float(total_norm),
                    scheduler.get_last_lr()[0], f"{throughput.rate > 0} {timers.keys()}",
                )  # fmt: skip
            running.zero_()
            if step >= args.max_steps:
                break
    val = validate(model, val_loader)
    if smp.pp_rank() == 0 and smp.rdp_rank() == 0:
        logger.info("Validation loss: %.6f, perplexity %.4f, %d parameters", val, math.exp(val), num_params)
    if args.model_dir and smp.rdp_rank() == 0:
        smp.save_checkpoint(args.model_dir, tag="neox.pt", partial=False, model=model)
    dist.barrier()
    if smp.rank() == 0 and args.model_dir:
        back = AutoModelForCausalLM.from_config(config)
        back.load_state_dict(torch.load(os.path.join(args.model_dir, "neox.pt"), map_location="cpu"))
        tokens = torch.tensor(Bytes(args, "val").tokens)
        with torch.no_grad():
            alone = back(input_ids=tokens, labels=tokens).loss.item()
        logger.info("Reloaded loss: %.6f", alone)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab_size", type=int, default=40)
    parser.add_argument("--context", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--val_batch_size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--gradient_accumulation", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--schedule", type=str, default="interleaved")
    parser.add_argument("--shard_optimizer_state", type=int, default=0, choices=(0, 1))
    parser.add_argument("--ckpt_layers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=2022)
    parser.add_argument("--model_dir", type=str, default="")
    arguments, _ = parser.parse_known_args()
    arguments.shard_optimizer_state = bool(arguments.shard_optimizer_state)
    assert nn is not None
    main(arguments)
