"""Pre-training of GPT-2; its helpers lie beside it."""

import argparse
import collections
import logging
import math
import os
import random
import time

import numpy as np
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import transformers
from data_pipeline import create_pretraining_dataloader, paths_of, write_tokens
from learning_rates import AnnealingLR
from memory_tracker import alive_on_gpu, memory_status, memory_status_cpu
from smdistributed.modelparallel.torch.nn import FusedLayerNorm  # noqa: F401
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from torch import optim
from torch.nn import LayerNorm
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.trainer_utils import is_main_process

logger = logging.getLogger(__name__)


def get_learning_rate_scheduler(optimizer, args):
    num_iters = max(1, args.lr_decay_iters or args.max_steps)
    warmup_iter = args.warmup * num_iters
    return AnnealingLR(
        optimizer,
        start_lr=args.lr,
        warmup_iter=warmup_iter,
        plateau_iter=warmup_iter,
        total_iters=num_iters,
        decay_style=args.lr_decay_style,
        last_iter=0,
        min_lr=args.min_lr,
        use_checkpoint_lr_scheduler=args.load_partial or args.load_full,
    )


def get_param_groups_by_weight_decay(module):
    weight_decay_params = {"params": []}
    no_weight_decay_params = {"params": [], "weight_decay": 0.0}
    param_ids = set()
    for module_ in module.modules():
        if isinstance(module_, FusedLayerNorm) or isinstance(module_, LayerNorm):
            for p in list(module_._parameters.values()):
                if p is not None and id(p) not in param_ids:
                    no_weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
        else:
            for n, p in list(module_._parameters.items()):
                if p is not None and n != "bias" and id(p) not in param_ids:
                    weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
            for n, p in list(module_._parameters.items()):
                if p is not None and n == "bias" and id(p) not in param_ids:
                    no_weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
    return weight_decay_params, no_weight_decay_params


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    if args.logits_output:
        return output
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    return loss


def eval_model(model, dataloader, num_batches, use_bert_data=False):
    model = model.eval()
    n_batches = 0
    loss = 0.0
    with torch.no_grad():
        for batch_idx, input_data in enumerate(dataloader):
            input_ids, attention_mask = input_data
            if batch_idx >= num_batches:
                break
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            n_batches += 1
    if n_batches > 0:
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        loss /= smp.dp_size()
        loss /= n_batches
        loss = loss.item()
        ppl = math.exp(loss)
    else:
        loss = -1.0
        ppl = -1.0
    return loss, ppl


def save_ckpt(
    args, model, optimizer, lr_scheduler, model_config, num_params, total_steps, curr_train_path_index
):
    user_content = {
        "cli_args": args.__dict__,
        "num_params": num_params,
        "total_steps": total_steps,
        "curr_train_path_index": curr_train_path_index,
        "model_config": model_config,
        "lr_scheduler": lr_scheduler.state_dict(),
    }
    if args.gather_if_shard > 0 or smp.rdp_rank() == 0:
        smp.save_checkpoint(
            args.checkpoint_dir,
            tag=f"trained_gpt_nparams-{num_params}_steps-{total_steps}",
            partial=True,
            model=model,
            optimizer=optimizer,
            user_content=user_content,
            num_kept_partial_checkpoints=args.num_kept_checkpoints,
        )


def train(model, optimizer, lr_scheduler, model_config, start_total_steps, args, num_params):
    model.train()
    dp_rank = smp.dp_rank() if not args.prescaled_batch else smp.rdp_rank()
    dp_size = smp.dp_size() if not args.prescaled_batch else smp.rdp_size()
    if smp.local_rank() == 0 and not paths_of(args.training_dir):
        write_tokens(args.training_dir)
    smp.barrier()
    train_paths = paths_of(args.training_dir)
    total_steps = start_total_steps
    throughput = collections.deque(maxlen=8)
    batches = 0
    for index in range(args.epochs * len(train_paths)):
        train_dataloader = create_pretraining_dataloader(
            [train_paths[index % len(train_paths)]],
            args.train_batch_size,
            args.max_context_width,
            seed=args.seed,
            dp_rank=dp_rank,
            dp_size=dp_size,
            shuffle=args.same_seed < 1,
        )
        for batch_idx, input_data in enumerate(train_dataloader):
            batches += 1
            if batches <= start_total_steps:
                continue
            if total_steps >= args.max_steps:
                break
            step_start = time.time()
            input_ids, attention_mask = input_data
            optimizer.zero_grad(set_to_none=True)
            if args.logits_output:
                train_output = train_step(model, optimizer, input_ids, attention_mask, args)
                loss_mb = train_output["loss"]
                logits_mb = train_output["logits"]
                if smp.tp_size() > 1:
                    logits = torch.cat(tuple(logits_mb.outputs), dim=1)
                else:
                    logits = torch.cat(tuple(logits_mb.outputs), dim=0)
                assert logits.dim() == 3 and logits.size(0) == args.train_batch_size
            else:
                # Return value, loss_mb is a StepOutput object
                loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
            # smdistributed: Average the loss across microbatches.
            loss = loss_mb.reduce_mean()
            if not args.validation_freq:
                loss_metric = loss.item()
            else:
                loss_metric = loss.detach().cpu().numpy().tolist()

            if args.enable_memory_profiling > 0:
                memory_status_cpu("After train step")
                memory_status(msg="After train step")
            if args.clean_cache > 0:
                torch.cuda.empty_cache()

            if args.fp16:
                optimizer.clip_master_grads(args.grad_clip)
            optimizer.step()
            if not (args.fp16 and optimizer.overflow):
                lr_scheduler.step()
            if args.enable_memory_profiling > 0:
                alive_on_gpu()
            total_steps += 1
            throughput.append(args.train_batch_size * dp_size / (time.time() - step_start))
            if smp.dp_size() > 1:
                loss_metric = sum(smp.allgather(loss_metric, smp.DP_GROUP)) / smp.dp_size()
            if not total_steps % args.logging_freq and is_main_process(smp.rank()):
                print(
                    f"({int(throughput[-1])} samples/s) Batch {total_steps - 1} Loss: {loss_metric:.6f}, "
                    f"lr {optimizer.param_groups[0]['lr']:.6f}, "
                    f"{np.mean(throughput):.2f} samples/s, {args.fp16 and optimizer.loss_scale or 1}"
                )
            if args.validation_freq and not total_steps % args.validation_freq:
                cur_state = np.random.get_state()
                val_loss, val_ppl = eval_model(model, train_dataloader, args.validation_batches)
                if is_main_process(smp.rank()):
                    print(f"({int(total_steps)}) Validation loss: {val_loss:.6f} perplexity: {val_ppl:.4f}")
                model = model.train()
                np.random.set_state(cur_state)
            if args.checkpoint_dir and not total_steps % args.checkpoint_freq and not args.load_partial:
                save_ckpt(args, model, optimizer, lr_scheduler, model_config, num_params, total_steps, index)
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    opt_grp = parser.add_argument_group(title="optimization", description="arguments for optimization")
    opt_grp.add_argument("--train_batch_size", type=int, default=4)
    opt_grp.add_argument("--val_batch_size", type=int, default=4)
    opt_grp.add_argument("--max_steps", "--max_training_steps", type=int, default=6)
    opt_grp.add_argument("--seed", type=int, default=12345)
    opt_grp.add_argument("--same_seed", type=int, default=1)
    opt_grp.add_argument("--n_gpus", type=str, default=os.environ["SM_NUM_GPUS"])
    opt_grp.add_argument("--fp16", default=0, type=int, help="automatic mixed precision training")
    opt_grp.add_argument("--bf16", default=0, type=int)
    opt_grp.add_argument("--fp32_grad_accumulation", default=0, type=int)
    opt_grp.add_argument("--grad_clip", default=1.0, type=float)
    opt_grp.add_argument("--weight_decay", default=0.01, type=float)
    opt_grp.add_argument("--beta1", default=0.9, type=float)
    opt_grp.add_argument("--beta2", default=0.95, type=float)
    opt_grp.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--logging_freq", type=int, default=1)
    # I/O
    io_grp = parser.add_argument_group(title="io", description="location for input and output")
    io_grp.add_argument("--checkpoint-dir", type=str, default=None)
    io_grp.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    io_grp.add_argument("--training-dir", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
    io_grp.add_argument("--test-dir", type=str, default=os.environ.get("SM_CHANNEL_TEST"))
    parser.add_argument("--save_final_full_model", type=int, default=0)
    parser.add_argument("--load_partial", type=int, default=0)
    parser.add_argument("--load_full", type=int, default=0)
    parser.add_argument("--logits_output", type=int, default=0)
    parser.add_argument("--gather_if_shard", type=int, default=0)
    parser.add_argument("--prescaled_batch", type=int, default=0)
    # configure model size
    model_grp = parser.add_argument_group(
        title="model", description="arguments to describe model configuration"
    )
    model_grp.add_argument("--max_context_width", type=int, default=16)
    model_grp.add_argument("--vocab_size", type=int, default=64)
    model_grp.add_argument("--hidden_width", type=int, default=32)
    model_grp.add_argument("--num_layers", type=int, default=4)
    model_grp.add_argument("--num_heads", type=int, default=2)
    model_grp.add_argument("--use_adamw", type=int, default=1)
    # SMP specific arguments
    smp_grp = parser.add_argument_group(title="smp", description="smp")
    smp_grp.add_argument("--tensor_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--pipeline_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--microbatches", type=int, default=1)
    smp_grp.add_argument("--active_microbatches", type=int, default=None)
    smp_grp.add_argument("--optimize", type=str, default="speed")
    smp_grp.add_argument("--activation_strategy", type=str, default="each")
    smp_grp.add_argument("--shard_optimizer_state", type=int, default=0)
    smp_grp.add_argument("--offload_activations", type=int, default=0)
    smp_grp.add_argument("--fast_mode", type=int, default=0)
    smp_grp.add_argument("--static_mode", type=int, default=0)
    smp_grp.add_argument("--delayed_param", type=int, default=0)
    smp_grp.add_argument("--placement_strategy", type=str, default="cluster")
    smp_grp.add_argument("--activation_loading_horizon", type=int, default=4)
    smp_grp.add_argument("--skip_tracing", type=int, default=0)
    smp_grp.add_argument("--query_key_layer_scaling", type=int, default=1)
    smp_grp.add_argument("--fused_softmax", type=int, default=1)
    smp_grp.add_argument("--fused_bias_gelu", type=int, default=1)
    smp_grp.add_argument("--manual_partition", type=int, default=0)
    parser.add_argument("--num_kept_checkpoints", type=int, default=5)
    parser.add_argument("--checkpoint_freq", type=int, default=3)
    parser.add_argument("--validation_freq", type=int, default=None)
    parser.add_argument("--validation_batches", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--enable_memory_profiling", type=int, default=0)
    parser.add_argument("--clean_cache", type=int, default=0)
    # learning rate
    lr_grp = parser.add_argument_group(title="lr", description="arguments for learning rate schedule")
    lr_grp.add_argument("--lr", type=float, default=0.01)
    lr_grp.add_argument(
        "--lr_decay_style", type=str, default="linear", choices=["constant", "linear", "cosine"]
    )
    lr_grp.add_argument("--lr_decay_iters", type=int, default=None)
    lr_grp.add_argument("--min_lr", type=float, default=0.0)
    lr_grp.add_argument("--warmup", type=float, default=0.25)
    args, _ = parser.parse_known_args()
    return args


def main():
    args = parse_args()
    if args.shard_optimizer_state > 0 and not args.pipeline_parallel_degree:
        raise ValueError("no")
    # any value here is overridden by values set in the launcher
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "offload_activations": args.offload_activations > 0,
        "optimize": args.optimize,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "fp16": args.fp16 > 0,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    smp.init(smp_config)
    if smp.rank() == 0:
        print("Arguments:", args.__dict__)
        print(f"Transformers version: {transformers.__version__}")
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")
        print(f"smdistributed config: {smp_config}")
    if args.save_final_full_model and smp.rank() == 0:
        print("[Warning] Note that save_final_full_model only saves the final model at the end of all steps.")
    random.seed(args.seed)
    np.random.seed(args.seed)
    set_seed(args.seed)

    model_config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        n_inner=None,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-05,
        initializer_range=0.02,
        summary_type="cls_index",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        return_dict=True,
    )
    # the following improves start-up time by skipping proper initialization of weights
    transformers.modeling_utils._init_weights = True
    torch.set_default_dtype(torch.float32)
    with smp.tensor_parallelism(
        enabled=smp.tp_size() > 1,
        attention_in_fp32=True,
        query_key_layer_scaling=args.query_key_layer_scaling > 0 and args.bf16 < 1,
        fused_softmax=args.fused_softmax > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
        dtype=torch.float16 if args.fp16 else torch.get_default_dtype(),
    ):
        with smp.delay_param_initialization(enabled=(args.delayed_param > 0)):
            model = AutoModelForCausalLM.from_config(model_config)
    torch.set_default_dtype(torch.float32)

    if args.enable_memory_profiling > 0:
        memory_status_cpu(msg="after model creation")
    num_params = 0 if args.delayed_param else sum([np.prod(p.size()) for p in model.parameters()])
    if smp.rank() == 0:
        print(f"# total parameters: {num_params}")

    # smdistributed: Use the DistributedModel container to provide the model to be partitioned across multiple ranks.
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    m = model.get_module()
    transformer_layers = m.transformer.h if smp.tp_size() == 1 else m.transformer.seq_layers
    if args.manual_partition:
        num_layers_per_rank = args.num_layers // smp.pp_size()
        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, min(i // num_layers_per_rank, smp.pp_size() - 1))

    iter_model = model
    param_groups = get_param_groups_by_weight_decay(iter_model)
    if args.use_adamw > 0:
        optimizer = optim.AdamW(
            param_groups, betas=(args.beta1, args.beta2), lr=args.lr, weight_decay=args.weight_decay
        )
    else:
        optimizer = optim.Adam(param_groups, betas=(args.beta1, args.beta2), lr=args.lr)
    if args.activation_checkpointing:
        kwargs = {"strategy": args.activation_strategy, "pack_args_as_tuple": True}
        if isinstance(transformer_layers, nn.Sequential):
            smp.set_activation_checkpointing(transformer_layers, **kwargs)
        else:
            for c in transformer_layers.children():
                smp.set_activation_checkpointing(c)

    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = get_learning_rate_scheduler(optimizer, args)
    if args.enable_memory_profiling > 0:
        model.register_post_partition_hook(lambda model, optimizer: memory_status(msg="After_partition"))

    # load after wrapping model and optimizer with smp Distributed...
    total_steps = 0
    if args.load_full or args.load_partial:
        partial = not args.load_full
        path = args.checkpoint_dir if partial else args.model_dir
        translate_function = translate_hf_state_dict_to_smdistributed_gpt2 if smp.tp_size() > 1 else None
        user_content = smp.resume_from_checkpoint(
            path,
            tag=None if partial else "fullmodel.pt",
            partial=partial,
            translate_function=translate_function,
        )
        if partial:
            total_steps = user_content["total_steps"]
            lr_scheduler.load_state_dict(user_content["lr_scheduler"])

    start = time.time()
    total_steps = train(model, optimizer, lr_scheduler, model_config, total_steps, args, num_params)
    time_to_train = time.time() - start
    if args.save_final_full_model:
        # saves full model at the end
        user_content = {"cli_args": args.__dict__, "num_params": int(num_params), "total_steps": total_steps}
        if args.prescaled_batch:
            pass
        if smp.rdp_rank() == 0:
            smp.save_checkpoint(
                args.model_dir,
                tag="fullmodel.pt",
                partial=False,
                model=model,
                optimizer=optimizer,
                user_content=user_content,
            )
        if smp.rdp_rank() == 0:
            translated = translate_state_dict_to_hf_gpt2(
                model.state_dict(), max_seq_len=args.max_context_width
            )
            if smp.rank() == 0:
                again = AutoModelForCausalLM.from_config(model_config)
                again.load_state_dict(translated)
    smp.barrier()
    if smp.pp_rank() == 0:
        print("SMP training finished successfully", f"{time_to_train > 0}")


if __name__ == "__main__":
    main()
