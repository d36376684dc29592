"""Sharded data parallelism: parameters, gradients and optimizer states over the ranks; full and partial checkpoints."""

import argparse
import contextlib
import os
import time

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.utils.data
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from transformers import GPT2Config, GPT2LMHeadModel, set_seed


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def param_count(model):
    # shapes are those of the whole parameters, wherever their shares are
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def groups(model):
    norms = (nn.LayerNorm, FusedLayerNorm)
    no_decay = {id(p) for m in model.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)}
    no_decay |= {id(p) for n, p in model.named_parameters() if n.endswith("bias")}
    return [
        {"params": [p for p in model.parameters() if id(p) not in no_decay], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) in no_decay], "weight_decay": 0.0},
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=5)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--sharded_data_parallel_degree", type=int, default=2)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--checkpoint-dir", type=str, default=None)
    parser.add_argument("--checkpoint_freq", type=int, default=3)
    parser.add_argument("--load_partial", type=int, default=0)
    parser.add_argument("--load_full", type=int, default=0)
    parser.add_argument("--save_final_full_model", type=int, default=0)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--seed", type=int, default=3)
    args, _ = parser.parse_known_args()

    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": 1,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
            "sdp_reduce_bucket_size": int(5e8),
            "sdp_param_persistence_threshold": int(1e6),
            "sdp_max_live_parameters": int(1e9),
            "sdp_hierarchical_allgather": True,
            "sdp_gradient_clipping": 1.0,
            "ddp_dist_backend": "auto",
            "bf16": args.bf16 > 0,
            "fp16": args.fp16 > 0,
            "offload_activations": False,
            "delayed_parameter_initialization": True,
        }
    )
    torch.cuda.set_device(smp.local_rank())
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=3, n_head=2, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1, dtype=torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    ):
        model = GPT2LMHeadModel(config)
    model = smp.DistributedModel(model, trace_device="gpu")
    optimizer = torch.optim.AdamW(groups(model), lr=args.lr, betas=(0.9, 0.95))
    if args.activation_checkpointing:
        for block in model.get_module().transformer.h:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "init_scale": 2.0**8},
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(
        optimizer.optimizer if args.fp16 or args.bf16 else optimizer, gamma=0.8
    )
    first = 0
    if args.load_partial or args.load_full:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=not args.load_full)
        if args.load_partial:
            first = content["step"]
            scheduler.load_state_dict(content["scheduler"])

    ids = (np.random.RandomState(5).randint(32, size=(64, 1)) + np.arange(16)) % 32
    data = torch.utils.data.TensorDataset(torch.from_numpy(ids).long(), torch.ones(64, 16, dtype=torch.long))
    sampler = torch.utils.data.DistributedSampler(
        data, shuffle=False, seed=args.seed, rank=smp.dp_rank(), num_replicas=smp.dp_size(), drop_last=True
    )
    loader = torch.utils.data.DataLoader(data, args.train_batch_size, sampler=sampler, drop_last=True)
    start, step = time.time(), 0
    for input_ids, attention_mask in loader:
        step += 1
        if step <= first:
            continue
        if step > args.max_steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, optimizer, input_ids, attention_mask, args).reduce_mean()
        if args.sharded_data_parallel_degree < 2:  # else the optimizer clips by itself
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            scheduler.step()
        loss = loss.detach().float()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            print(
                f"Batch {step} Loss: {loss.item() / smp.dp_size():.6f} scale {optimizer.loss_scaler is not None}"
            )
        if step == args.checkpoint_freq and args.checkpoint_dir and not first:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"sdp_{step}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={"step": step, "scheduler": scheduler.state_dict(), "cli_args": vars(args)},
                num_kept_partial_checkpoints=1,
            )
    with torch.no_grad():
        model.eval()
        total = sum(test_step(model, *batch).reduce_mean() for batch in loader) / len(loader)
    torch.distributed.all_reduce(total.float(), group=smp.get_dp_process_group())
    if smp.rank() == 0:
        print(f"{param_count(model)} parameters, evaluated: {total.item() > 0}, {time.time() - start > 0}")
    if args.save_final_full_model:
        smp.save_checkpoint(args.checkpoint_dir, tag="full", partial=False, model=model, optimizer=optimizer)
        if smp.rank() == 0:
            state = torch.load(os.path.join(args.checkpoint_dir, "full"), map_location="cpu")
            alone = GPT2LMHeadModel(config).eval()
            alone.load_state_dict(state, strict=False)
            with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
                print(f"Full model: {alone(input_ids=data[:][0], labels=data[:][0]).loss.item():.4f}")
    smp.barrier()


if __name__ == "__main__":
    main()
