"""Hugging Face's Trainer, as any script uses it; nothing in it is about several processes."""

from __future__ import annotations

import argparse
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


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        start = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(3))
        self.ids = (start + torch.arange(12)) % 32

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()
    set_seed(4)
    config = GPT2Config(
        vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, loss_type="ForCausalLM",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=args.output_dir, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        gradient_accumulation_steps=2, max_grad_norm=0.5, max_steps=3, learning_rate=0.01, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=4,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(32), eval_dataset=Tokens(8),
        data_collator=default_data_collator,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    logs = [
        [entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry
    ]
    print("RESULT", json.dumps([trainer.args.parallel_mode.value, before, result.training_loss, after, logs]))


if __name__ == "__main__":
    main()
