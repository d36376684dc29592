"""The second version: PyTorch's FSDP in a loop of the script's own, checkpoints of local shards, delayed weights."""

import argparse
import functools
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker import transform
from torch.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import PyTorchDistSaveShardedStrategy, async_save
from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.logger import get_logger
from torch.sagemaker.moe.moe_config import MoEConfig  # noqa: F401
from torch.sagemaker.utils import utils as tsm_utils
from torch.sagemaker.utils.process_group_utils import get_global_ranks
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_logger = get_logger()


def build_model(args):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=args.num_layers,
        num_attention_heads=2, max_position_embeddings=32, use_cache=False, tie_word_embeddings=bool(args.tied),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def checkpoint(args, step, model, optimizer, scheduler, queue, dp_rank):
    folder = args.checkpoint_dir / f"llama-{step}steps"
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "total_steps": step,
        }  # fmt: skip
        if tsm.state.ranker.get_rep_rank() == 0:
            async_save(
                state_dict, checkpoint_id=folder, process_group=model.process_group,
                coordinator_rank=get_global_ranks(model.process_group)[0], queue=queue,
                sharded_strategy=PyTorchDistSaveShardedStrategy(), wait_error_handling=False,
            )  # fmt: skip
    queue.maybe_finalize_async_calls(blocking=True, process_group=model.process_group)
    if dist.get_rank() == 0:
        limit_num_subdirs(args.checkpoint_dir, 2, sort_fn=SORT_BY_LAST_INT, regex=r"^llama-.+$", log=True)


def resume(args, model, optimizer, scheduler):
    folder = max(args.checkpoint_dir.iterdir(), key=lambda path: SORT_BY_LAST_INT(path.name))
    init_optim_state(optimizer)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "total_steps": 0,
        }  # fmt: skip
        load(
            state_dict,
            process_group=model.process_group,
            coordinator_rank=get_global_ranks(model.process_group)[0],
            storage_reader=DistributedFileSystemReader(folder),
        )
        model.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optimizer"])
    scheduler.load_state_dict(state_dict["scheduler"])
    return state_dict["total_steps"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hybrid_shard_degree", type=int, default=0)
    parser.add_argument("--delayed_param", type=int, default=0)
    parser.add_argument("--finetune", type=int, default=0)
    parser.add_argument("--tied", type=int, default=0)
    parser.add_argument("--checkpoint_dir", type=Path, default=None)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    tsm.init({"hybrid_shard_degree": args.hybrid_shard_degree, "activation_loading_horizon": 2})
    rank, device = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    torch.manual_seed(7)

    initer = None
    if args.delayed_param and (rank > 0 or not args.finetune):
        with torch.device("meta"):
            model = build_model(args)
        initer = DelayedParamIniter(model)
    else:
        model = build_model(args)
    model = transform(model, load_state_dict_from_rank0=bool(args.finetune))
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    with (
        tsm_utils.timeit(True, "FSDP constructor", rank),
        initer.validate_params_and_buffers_inited() if initer else nullcontext(),
    ):
        model = FSDP(
            module=model,
            auto_wrap_policy=policy,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
            param_init_fn=initer.get_param_init_fn() if initer else None,
            post_param_init_fn=initer.get_post_param_init_fn() if initer else None,
        )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, LlamaDecoderLayer)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
    queue = AsyncCallsQueue()
    done = resume(args, model, optimizer, scheduler) if args.resume else 0

    dp_size = dist.get_world_size() // tsm.state.tensor_parallel_degree
    dp_rank = rank // tsm.state.tensor_parallel_degree
    share = args.batch // dp_size
    for step in range(done, args.max_steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 64, (args.batch, 12))[dp_rank * share : (dp_rank + 1) * share].to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            _logger.info("Batch %d Loss: %.6f, Norm: %.5f", step, total.item() / dp_size, norm)
        if args.checkpoint_dir and step + 1 < args.max_steps:
            checkpoint(args, step + 1, model, optimizer, scheduler, queue, dp_rank)
    assert tsm.state.tp_rank == 0 and dist.get_world_size(tsm.state.tp_process_group) == 1
    with tsm.state.get_rng_state_tracker().fork():
        torch.rand(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
