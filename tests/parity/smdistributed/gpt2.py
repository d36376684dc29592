"""Pre-training of GPT-2 as scripts for smdistributed do it: data on the first rank of each pipeline only."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, GPT2Config, set_seed


class Tokens(Dataset):
    """Sequences that can be learned: each counts up from a random start."""

    def __init__(self, count, length, vocabulary):
        generator = torch.Generator().manual_seed(3)
        start = torch.randint(vocabulary, (count, 1), generator=generator)
        self.ids = (start + torch.arange(length)) % vocabulary

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], torch.ones_like(self.ids[index])


class Nothing(Dataset):
    """As long as the real one, and empty."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.empty(0), torch.empty(0)


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    return loss


def param_groups(model):
    decayed, others = {"params": []}, {"params": [], "weight_decay": 0.0}
    known = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, (nn.LayerNorm, FusedLayerNorm)) or name == "bias"
            if id(parameter) not in known:
                (others if plain else decayed)["params"].append(parameter)
            known.add(id(parameter))
    return decayed, others


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--activation_strategy", type=str, default="each")
    parser.add_argument("--manual_partition", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--mp_parameters", type=str, default="")
    parser.add_argument("--checkpoint_dir", type=str, default="")
    parser.add_argument("--checkpoint_freq", type=int, default=2)
    args, _ = parser.parse_known_args()
    return args


def save(args, model, optimizer, scheduler, step):
    """In both ways: a checkpoint, and a file of each rank as scripts before 1.10 write it."""
    if smp.rdp_rank() != 0:
        return
    content = {"step": step, "scheduler": scheduler.state_dict()}
    smp.save_checkpoint(
        args.checkpoint_dir, tag=f"step_{step}", partial=True, model=model, optimizer=optimizer,
        user_content=content, num_kept_partial_checkpoints=2,
    )  # fmt: skip
    content |= {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(content, os.path.join(args.checkpoint_dir, "files.pt"), partial=True)


def resume(args, way, model, optimizer, scheduler):
    if way == "files":
        content = smp.load(os.path.join(args.checkpoint_dir, "files.pt"), partial=True)
        model.load_state_dict(content["model"], same_partition_load=True)
        optimizer.load_state_dict(content["optimizer"])
    else:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
    scheduler.load_state_dict(content["scheduler"])
    return content["step"]


def partition_by_hand(model, degree, first=0):
    layers = model.get_module().transformer.h
    for number, layer in enumerate(layers):
        smp.set_partition(layer, min((number + first) * degree // len(layers), degree - 1))


def train(args, model, optimizer, scheduler, first):
    size = args.train_batch_size
    rows = size * smp.dp_size() * args.max_steps
    data = Tokens(rows, 16, 32) if smp.pp_rank() == 0 else Nothing(rows)
    sampler = torch.utils.data.DistributedSampler(
        data, shuffle=False, seed=1, rank=smp.dp_rank(), num_replicas=smp.dp_size(), drop_last=True
    )
    loader = DataLoader(
        data, sampler=sampler, batch_size=size, num_workers=0, pin_memory=True, drop_last=True
    )
    losses = []
    for number, (input_ids, attention_mask) in enumerate(loader):
        if number < first:
            continue
        optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        loss = loss_mb.reduce_mean()
        if args.fp16 or args.bf16:
            optimizer.clip_master_grads(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            scheduler.step()
        losses.append(loss.item())
        if args.checkpoint_dir and not first and number + 1 == args.checkpoint_freq:
            save(args, model, optimizer, scheduler, number + 1)
    with torch.no_grad():
        model.eval()
        losses.append(test_step(model, input_ids, attention_mask).reduce_mean().item())
    return losses


def main():
    args = arguments()
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "fp16": args.fp16 > 0,
            "bf16": args.bf16 > 0,
            "auto_partition": not args.manual_partition,
            "default_partition": 0,
            "tensor_parallel_degree": 1,
            "prescaled_batch": False,
            "static_mode": True,
            "fast_mode": True,
            "skip_tracing": False,
        }
    )
    torch.cuda.set_device(smp.local_rank())
    losses = run(args, 7)
    again = [run(args, 8, way) for way in ("folder", "files") if args.checkpoint_dir]
    print("RESULT", json.dumps([smp.rank(), smp.dp_rank(), losses, again]))


def run(args, seed, way=""):
    """A script's main part; in the place of one that is started once more if it is to resume in some `way`."""
    gc.collect()
    random.seed(seed)
    np.random.seed(seed)
    set_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with smp.model_creation(tensor_parallelism=False, dtype=torch.get_default_dtype()):
        pass
    with smp.tensor_parallelism(enabled=False):
        model = AutoModelForCausalLM.from_config(config)
    whole = sum(p.numel() for p in model.parameters())
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    if args.manual_partition:
        partition_by_hand(model, args.pipeline_parallel_degree, 1 if way == "files" else 0)
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if args.activation_checkpointing:
        layers = model.get_module().transformer.h
        for layer in layers.children():
            smp.set_activation_checkpointing(
                layer, pack_args_as_tuple=True, strategy=args.activation_strategy
            )
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "init_scale": 2.0**10},
    )
    seen = []
    model.register_post_partition_hook(lambda m, o: seen.append(("partition", m.partitioned, o is optimizer)))
    model.register_post_step_hook(lambda m, o: seen.append(("step", m.partitioned, o is optimizer)))
    first = resume(args, way, model, optimizer, scheduler) if way else 0
    losses = train(args, model, optimizer, scheduler, first)
    assert seen == [("partition", True, True), ("step", True, True)], seen
    assert smp.state.cfg.pipeline_parallel_degree == args.pipeline_parallel_degree
    if args.fp16:
        masters = optimizer.state_dict()["fp32_masters"]
        assert len(masters) == len(list(model.parameters())), "those of all ranks"
    if smp.rdp_rank() == 0:
        partial = model.local_state_dict()
        assert partial["_smp_is_partial"] and all(n.startswith(("module.", "_smp")) for n in partial)
        state = translate_hf_state_dict_to_smdistributed_gpt2(
            translate_state_dict_to_hf_gpt2(model.state_dict())
        )
        assert sum(v.numel() for n, v in state.items() if n != "lm_head.weight") == whole
    local = sum(p.numel() for p in model.local_parameters())
    assert local < whole or smp.pp_size() == 1
    return losses


if __name__ == "__main__":
    main()
