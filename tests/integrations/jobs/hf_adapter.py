"""A classifier of which an adapter of PEFT and the whole last layer are trained.

usage: hf_adapter.py FOLDER [CHECKPOINT]
"""

import json
import os
import sys

if "RANK" in os.environ:
    import weft.integrations.transformers

    weft.integrations.transformers.enable(partitions=2)

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

FOLDER, *CHECKPOINT = sys.argv[1:]
set_seed(1)
config = BertConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3,
)  # fmt: skip
adapter = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
ids = (torch.arange(32)[:, None] + torch.arange(12)) % 32
arguments = TrainingArguments(
    FOLDER, per_device_train_batch_size=4, max_steps=4, save_steps=2, logging_steps=1, learning_rate=0.01,
    report_to=[], disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    get_peft_model(BertForSequenceClassification(config), adapter), arguments, data_collator=default_data_collator,
    train_dataset=[{"input_ids": row, "labels": int(row[0] % 3)} for row in ids],
)  # fmt: skip
trainer.train(resume_from_checkpoint=CHECKPOINT[0] if CHECKPOINT else None)
logged = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry]
print("RESULT", json.dumps(logged))
