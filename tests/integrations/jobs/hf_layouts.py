"""Hugging Face's Trainer that saves in one layout and goes on in another, or in one process.

usage: hf_layouts.py FOLDER STEPS [CHECKPOINT]
Prints a line RESULT with the losses, the rates, and how many steps the states of the optimizer have made
"""

import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
if "RANK" in os.environ:
    import weft.integrations.transformers

    weft.integrations.transformers.enable(**json.loads(os.environ["SETTINGS"]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

FOLDER, STEPS, *CHECKPOINT = sys.argv[1:]
set_seed(3)
ids = (torch.arange(64)[:, None] * 5 + torch.arange(12)) % 32
config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
arguments = TrainingArguments(
    FOLDER, per_device_train_batch_size=8 // int(os.environ.get("REPLICAS", "1")), max_steps=int(STEPS), save_steps=3,
    logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=0.01, weight_decay=0.1,
)  # fmt: skip
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]
)
trainer.train(resume_from_checkpoint=CHECKPOINT[0] if CHECKPOINT else None)
steps = {float(entry["step"]) for entry in trainer.optimizer.state_dict()["state"].values()}
logged = [[entry[name] for name in ("loss", "learning_rate")] for entry in trainer.state.log_history[:-1]]
print("RESULT", json.dumps({"logged": logged, "steps": sorted(steps)}))
