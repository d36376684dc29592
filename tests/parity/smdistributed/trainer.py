"""Hugging Face's Trainer, as any script uses it; nothing in it is about several processes."""

from __future__ import annotations

import argparse
import gc
import json

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

SAVED, STEPS = 2, 4


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        start = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(3))
        self.ids = (start + torch.arange(12)) % 32

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make_trainer(output_dir, batch, seed):
    set_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, loss_type="ForCausalLM",
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2, max_grad_norm=0.5, max_steps=STEPS, learning_rate=0.01, logging_steps=1,
        save_strategy="steps", save_steps=SAVED, eval_strategy="steps", eval_steps=SAVED,
        load_best_model_at_end=True, report_to=[], disable_tqdm=True, seed=4,
    )  # fmt: skip
    return Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(32), eval_dataset=Tokens(8),
        data_collator=default_data_collator,
    )  # fmt: skip


def logged(trainer):
    return [
        [entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--batch", type=int, default=4, help="samples for each replica")
    args = parser.parse_args()
    trainer = make_trainer(args.output_dir, args.batch, 4)
    mode = trainer.args.parallel_mode.value
    before = trainer.evaluate()["eval_loss"]
    training = trainer.train().training_loss
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    logs = logged(trainer)
    del trainer
    gc.collect()
    resumed = make_trainer(args.output_dir, args.batch, 5)
    resumed.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-{SAVED}")
    again = [logged(resumed)[SAVED:], resumed.evaluate()["eval_loss"]]
    print("RESULT", json.dumps([mode, before, training, after, logs, again]))


if __name__ == "__main__":
    main()
