"""A trainer of one's own: arguments, model, data and loop in an object."""

import os
import time
from dataclasses import dataclass, field

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.utils.data
from transformers.trainer_utils import is_main_process


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, labels):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    loss = output["loss"]
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, input_ids, attention_mask, labels):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    return output["loss"], output["logits"].argmax(-1)


@dataclass
class TrainerState:
    step: int = 0
    best: float = float("inf")
    history: list = field(default_factory=list)


class SMPTrainer:
    # decorated functions as attributes of a class: they are called without self
    train_step = train_step
    eval_step = eval_step

    def __init__(self, args, model_init, train_dataset, eval_dataset, collator):
        self.args = args
        self.state = TrainerState()
        self.train_dataset, self.eval_dataset, self.collator = train_dataset, eval_dataset, collator
        with smp.model_creation(
            tensor_parallelism=smp.tp_size() > 1,
            dtype=torch.float16 if args.fp16 else torch.get_default_dtype(),
            attention_in_fp32=False,
            query_key_layer_scaling=False,
            fused_softmax=True,
            fused_bias_gelu=True,
        ):
            model = model_init()
        self.model = smp.DistributedModel(model, trace_device=args.trace_device)
        self.create_optimizer_and_scheduler()
        if args.activation_checkpointing:
            for layer in self.model.module.module.transformer.h:
                smp.set_activation_checkpointing(layer)
        self.device = torch.device("cuda", smp.local_rank())
        self.log = print if is_main_process(smp.rank()) else (lambda *ignored: None)

    def create_optimizer_and_scheduler(self):
        args = self.args
        no_decay = ["bias", "ln_1.weight", "ln_f.weight"]
        grouped = [
            {
                "params": [
                    p for n, p in self.model.named_parameters() if not any(part in n for part in no_decay)
                ],
                "weight_decay": 0.1,
            },
            {
                "params": [
                    p for n, p in self.model.named_parameters() if any(part in n for part in no_decay)
                ],
                "weight_decay": 0.0,
            },
        ]
        self.optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(grouped, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-6),
            dynamic_loss_scale=True,
            dynamic_loss_args={"scale_window": 500, "min_scale": 1, "init_scale": 2**8},
        )
        inner = self.optimizer.optimizer if args.fp16 else self.optimizer
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, args.learning_rate, args.max_steps + 1)

    def get_dataloader(self, dataset, batch_size, shuffle):
        sampler = torch.utils.data.DistributedSampler(
            dataset, num_replicas=smp.rdp_size(), rank=smp.rdp_rank(), shuffle=shuffle, seed=self.args.seed
        )
        return torch.utils.data.DataLoader(
            dataset,
            sampler=sampler,
            batch_size=batch_size,
            collate_fn=self.collator,
            drop_last=True,
            pin_memory=True,
        )

    def train(self, resume=False):
        args = self.args
        content = None
        if resume:
            content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=args.tag, partial=True)
            self.state.step = content["step"]
            self.scheduler.load_state_dict(content["scheduler"])
            torch.set_rng_state(content["rng"])
        loader = self.get_dataloader(self.train_dataset, args.per_device_train_batch_size, False)
        start = time.perf_counter()
        seen = 0
        while self.state.step < args.max_steps:
            for batch in loader:
                seen += 1
                if resume and seen <= content["step"]:
                    continue
                self.model.train()
                batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
                self.optimizer.zero_grad()
                loss = self.train_step(self.model, self.optimizer, **batch).reduce_mean().detach()
                if args.fp16:
                    self.optimizer.clip_master_grads(args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
                self.optimizer.step()
                if not (args.fp16 and self.optimizer.overflow):
                    self.scheduler.step()
                self.state.step += 1
                gathered = smp.allgather(loss, group=smp.CommGroup.DP_GROUP)
                mean = torch.stack([g.cpu() for g in gathered]).mean()
                self.state.history.append(mean.item())
                self.log(f"step {self.state.step} loss {mean:.6f} lr {self.scheduler.get_last_lr()[0]:.2e}")
                if self.state.step == args.save_steps and not resume:
                    self.save()
                if self.state.step >= args.max_steps:
                    break
        torch.cuda.synchronize(self.device)
        self.log(f"took {time.perf_counter() - start:.1f} s")
        return self.evaluate()

    def evaluate(self):
        self.model.eval()
        total, right, count = [], 0, 0
        loader = self.get_dataloader(self.eval_dataset, self.args.per_device_eval_batch_size, False)
        with torch.no_grad():
            for batch in loader:
                loss_mb, predicted_mb = self.eval_step(self.model, **batch)
                total.append(loss_mb.reduce_mean())
                predicted = predicted_mb.concat()
                right += (predicted[:, :-1] == batch["labels"][:, 1:]).sum().item()
                count += batch["labels"][:, 1:].numel()
        loss = torch.mean(torch.stack(total))
        everywhere = smp.allgather((loss.item(), right, count), smp.DP_GROUP)
        loss = np.mean([e[0] for e in everywhere])
        accuracy = sum(e[1] for e in everywhere) / sum(e[2] for e in everywhere)
        self.log(f"eval loss {loss:.6f} accuracy {accuracy:.4f}")
        return loss

    def save(self):
        content = {
            "step": self.state.step,
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
            "np_rng": np.random.get_state(),
            "args": vars(self.args),
        }
        smp.save_checkpoint(
            self.args.checkpoint_dir,
            self.args.tag,
            model=self.model,
            optimizer=self.optimizer,
            user_content=content,
        )
        smp.barrier()
        if smp.local_rank() == 0:
            assert os.path.isdir(os.path.join(self.args.checkpoint_dir, f"{self.args.tag}_partial"))
