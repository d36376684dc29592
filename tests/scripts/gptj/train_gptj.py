"""Fine-tuning of GPT-J with a trainer that lies beside the script."""

import argparse
import os
import sys

import smdistributed.modelparallel.torch as smp
import torch
from torch.utils.data import Dataset
from transformers import GPTJConfig, GPTJForCausalLM, set_seed

cfg = {
    "microbatches": 2,
    "pipeline_parallel_degree": int(os.environ.get("SM_HP_PIPELINE_PARALLEL_DEGREE", 2)),
    "placement_strategy": "spread",
    "tensor_parallel_degree": 1,
    "prescaled_batch": True,
    "optimize": "memory",
    "ddp": True,
    "fp16": "--fp16" in sys.argv,
    "delayed_parameter_initialization": True,
    "skip_tracing": True,
    "_match_weights": False,
}
smp.init(cfg)

from smp_trainer import SMPTrainer  # noqa: E402


class Lines(Dataset):
    def __init__(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        self.rows = (torch.randint(48, (count, 1), generator=generator) + torch.arange(12)) % 48

    def __len__(self):
        return self.rows.shape[0]

    def __getitem__(self, idx):
        return {"input_ids": self.rows[idx], "labels": self.rows[idx]}


def collate(examples):
    batch = {key: torch.stack([e[key] for e in examples]) for key in examples[0]}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def model_init():
    config = GPTJConfig(
        vocab_size=48, n_positions=16, n_embd=32, n_layer=4, n_head=2, rotary_dim=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTJForCausalLM(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--save_steps", type=int, default=3)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--activation_checkpointing", type=lambda x: x == "True", default=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--trace_device", type=str, default="gpu")
    parser.add_argument("--checkpoint_dir", type=str, default="/opt/ml/checkpoints")
    parser.add_argument("--tag", type=str, default="latest")
    parser.add_argument("--resume", action="store_true")
    args, unknown = parser.parse_known_args()
    torch.cuda.set_device(smp.local_rank())
    set_seed(args.seed)
    trainer = SMPTrainer(args, model_init, Lines(1, 64), Lines(2, 16), collate)
    trainer.train(resume=args.resume)
    if smp.rdp_rank() == 0:
        state = trainer.model.state_dict(gather_to_rank0=True)
        if smp.rank() == 0:
            model = model_init()
            print(model.load_state_dict(state, strict=False))
        else:
            assert not state, f"only the first rank has the state, here are {len(state)} tensors"
    smp.barrier()


if __name__ == "__main__":
    main()
