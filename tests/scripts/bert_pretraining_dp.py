"""BERT's two objectives with data parallelism of the older style: own functions, gradient accumulation, LAMB."""

import argparse
import glob
import json
import logging
import math
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor  # noqa: F401

import numpy as np
import smdistributed.dataparallel.torch.distributed as dist
import torch
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import BertConfig, BertForPreTraining

try:
    from apex import amp
    from apex.optimizers import FusedLAMB
except ImportError:
    amp, FusedLAMB = None, None

if not dist.is_initialized():
    dist.init_process_group()
logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", level=logging.WARNING)
logger = logging.getLogger(__name__)


class WorkerInitObj(object):
    def __init__(self, seed):
        self.seed = seed

    def __call__(self, id):
        np.random.seed(seed=self.seed + id)
        random.seed(self.seed + id)


class pretraining_dataset(Dataset):
    def __init__(self, input_file, max_pred_length):
        self.max_pred_length = max_pred_length
        with np.load(input_file) as f:
            keys = [
                "input_ids",
                "input_mask",
                "segment_ids",
                "masked_lm_positions",
                "masked_lm_ids",
                "labels",
            ]
            self.inputs = [np.asarray(f[key]) for key in keys]

    def __len__(self):
        return len(self.inputs[0])

    def __getitem__(self, index):
        input_ids, input_mask, segment_ids, positions, ids, label = [
            torch.from_numpy(np.asarray(input[index]).astype(np.int64)) for input in self.inputs
        ]
        masked_lm_labels = torch.ones(input_ids.shape, dtype=torch.long) * -1
        masked_lm_labels[positions] = ids
        return [input_ids, segment_ids, input_mask, masked_lm_labels, label]


class BertPretrainingCriterion(torch.nn.Module):
    def __init__(self, vocab_size):
        super(BertPretrainingCriterion, self).__init__()
        self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-1)
        self.vocab_size = vocab_size

    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels):
        masked_lm_loss = self.loss_fn(prediction_scores.view(-1, self.vocab_size), masked_lm_labels.view(-1))
        next_sentence_loss = self.loss_fn(seq_relationship_score.view(-1, 2), next_sentence_labels.view(-1))
        return masked_lm_loss + next_sentence_loss


class PolyWarmUpScheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, warmup, total_steps, degree=0.5, last_epoch=-1):
        self.warmup, self.total_steps, self.degree = warmup, total_steps, degree
        super(PolyWarmUpScheduler, self).__init__(optimizer, last_epoch)

    def get_lr(self):
        progress = self.last_epoch / self.total_steps
        if progress < self.warmup:
            return [base_lr * progress / self.warmup for base_lr in self.base_lrs]
        return [base_lr * max(1.0 - progress, 0.0) ** self.degree for base_lr in self.base_lrs]


def write_shards(folder, seed=11):
    state = np.random.RandomState(seed)
    for number in range(2):
        ids = (state.randint(5, 60, size=(32, 1)) + np.arange(12)) % 55 + 5
        positions = np.stack([state.permutation(12)[:2] for _ in range(32)])
        masked = np.take_along_axis(ids, positions, 1)
        np.put_along_axis(ids, positions, 3, 1)
        path = os.path.join(folder, f"part_{number}_training.tmp.npz")
        np.savez(
            path, input_ids=ids, input_mask=np.ones_like(ids), segment_ids=np.zeros_like(ids),
            masked_lm_positions=positions, masked_lm_ids=masked, labels=state.randint(2, size=32),
        )  # fmt: skip
        os.replace(path, path.replace(".tmp", ""))


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--input_dir", default=os.environ["SM_CHANNEL_TRAIN"], type=str)
    parser.add_argument("--output_dir", default=os.environ["SM_MODEL_DIR"], type=str)
    parser.add_argument("--config_file", default="bert_config.json", type=str)
    parser.add_argument("--train_batch_size", default=16, type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", default=2e-2, type=float)
    parser.add_argument("--max_steps", default=4, type=float)
    parser.add_argument("--warmup_proportion", default=0.25, type=float)
    parser.add_argument("--local_rank", type=int, default=os.getenv("LOCAL_RANK", -1))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16", default=False, action="store_true")
    parser.add_argument("--loss_scale", type=float, default=0.0)
    parser.add_argument("--allreduce_post_accumulation", default=False, action="store_true")
    parser.add_argument("--resume_from_checkpoint", default=False, action="store_true")
    parser.add_argument("--resume_step", type=int, default=-1)
    parser.add_argument("--num_steps_per_checkpoint", type=int, default=2)
    parser.add_argument("--steps_this_run", type=float, default=-1)
    parser.add_argument("--do_train", default=False, action="store_true")
    args = parser.parse_args()
    args.local_rank = dist.get_local_rank()
    if args.steps_this_run < 0:
        args.steps_this_run = args.max_steps
    return args


def is_main_process():
    return dist.get_rank() == 0


def prepare_model_and_optimizer(args, device):
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForPreTraining(config)
    checkpoint = None
    if args.resume_from_checkpoint:
        if args.resume_step == -1:
            names = [f for f in os.listdir(args.output_dir) if f.startswith("ckpt_") and f.endswith(".pt")]
            args.resume_step = max(int(x.split(".pt")[0].split("_")[1].strip()) for x in names)
        path = os.path.join(args.output_dir, "ckpt_{}.pt".format(args.resume_step))
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"], strict=False)
    model.to(device)
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    grouped = [
        {
            "params": [p for n, p in param_optimizer if not any(part in n for part in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in param_optimizer if any(part in n for part in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    if FusedLAMB is not None:
        optimizer = FusedLAMB(grouped, lr=args.learning_rate)
    else:
        optimizer = torch.optim.AdamW(grouped, lr=args.learning_rate / 4)
    lr_scheduler = PolyWarmUpScheduler(optimizer, warmup=args.warmup_proportion, total_steps=args.max_steps)
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["scheduler"])
    model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank, broadcast_buffers=False)
    model.checkpoint_activations(False) if hasattr(model, "checkpoint_activations") else None
    return model, optimizer, lr_scheduler, checkpoint, BertPretrainingCriterion(config.vocab_size)


def main():
    args = parse_arguments()
    random.seed(args.seed + args.local_rank)
    np.random.seed(args.seed + args.local_rank)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed(args.seed)
    assert torch.cuda.is_available()
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)
    if dist.get_local_rank() == 0 and not glob.glob(os.path.join(args.input_dir, "*_training.npz")):
        write_shards(args.input_dir)
    dist.barrier()
    model, optimizer, lr_scheduler, checkpoint, criterion = prepare_model_and_optimizer(args, device)
    scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
    if is_main_process():
        print(
            "SEED {}".format(args.seed),
            json.dumps({k: v for k, v in vars(args).items() if k != "output_dir"}),
        )

    model.train()
    average_loss, global_step, training_steps = 0.0, max(args.resume_step, 0), 0
    per_rank = args.train_batch_size // dist.get_world_size() // args.gradient_accumulation_steps
    files = sorted(glob.glob(os.path.join(args.input_dir, "*_training.npz")))
    torch.cuda.synchronize()
    train_start = time.time()
    for f_id in range(int(args.max_steps)):
        train_data = pretraining_dataset(files[f_id % len(files)], 2)
        assert RandomSampler is not None
        sampler = torch.utils.data.distributed.DistributedSampler(
            train_data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False
        )
        train_dataloader = DataLoader(
            train_data, sampler=sampler, batch_size=per_rank, num_workers=0,
            worker_init_fn=WorkerInitObj(args.seed + args.local_rank), pin_memory=True,
        )  # fmt: skip
        for step, batch in enumerate(train_dataloader):
            if (
                f_id * len(train_dataloader) + step
                < max(args.resume_step, 0) * args.gradient_accumulation_steps
            ):
                continue
            training_steps += 1
            batch = [t.to(device) for t in batch]
            input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels = batch
            with torch.cuda.amp.autocast(enabled=args.fp16):
                outputs = model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
                loss = criterion(outputs[0], outputs[1], masked_lm_labels, next_sentence_labels)
            divisor = args.gradient_accumulation_steps
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
                divisor = 1.0
            if training_steps % args.gradient_accumulation_steps:
                with model.no_sync():
                    pass
            scaler.scale(loss).backward()
            average_loss += loss.item()
            if training_steps % args.gradient_accumulation_steps == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                lr_scheduler.step()
                for param in model.parameters():
                    param.grad = None
                global_step += 1
                final = torch.tensor(average_loss, dtype=torch.float32).cuda() / divisor
                dist.all_reduce(final)
                final /= dist.get_world_size()
                if is_main_process():
                    print(
                        "Step:{} Average Loss = {:.6f} Learning Rate = {:.3e}".format(
                            global_step, final.item(), optimizer.param_groups[0]["lr"]
                        )
                    )
                average_loss = 0.0
                if is_main_process() and global_step % args.num_steps_per_checkpoint == 0:
                    model_to_save = model.module if hasattr(model, "module") else model
                    torch.save(
                        {
                            "model": model_to_save.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": lr_scheduler.state_dict(),
                            "files": [f_id] + files,
                        },
                        os.path.join(args.output_dir, "ckpt_{}.pt".format(global_step)),
                    )
            if global_step >= args.max_steps:
                dist.barrier()
                if is_main_process():
                    seconds = time.time() - train_start
                    print(
                        f"training_sequences_per_second {training_steps * args.train_batch_size / seconds > 0}"
                    )
                    assert math.isfinite(final.item()) and amp is None
                return


if __name__ == "__main__":
    main()
