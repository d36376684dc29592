"""ViT with Hugging Face's Trainer: features in a dataset, a metric, a checkpoint and a resume."""

import argparse
import logging
import os
import sys

import numpy as np
import torch
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        rng = np.random.RandomState(seed)
        kinds = np.random.RandomState(5).randn(4, 3, 16, 16)
        self.labels = rng.randint(4, size=count)
        self.pixels = (kinds[self.labels] + 0.5 * rng.randn(count, 3, 16, 16)).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.pixels[i], "label": int(self.labels[i]), "path": f"{i}.jpg"}


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([torch.from_numpy(e["pixel_values"]) for e in examples]),
        "labels": torch.tensor([e["label"] for e in examples]),
    }


def compute_metrics(eval_pred):
    logits = eval_pred.predictions[0] if isinstance(eval_pred.predictions, tuple) else eval_pred.predictions
    return {"accuracy": float((np.argmax(logits, axis=1) == eval_pred.label_ids).mean())}


class Printer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(
                f"step {state.global_step} loss: {logs['loss']} lr: {logs['learning_rate']:.3e}", flush=True
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--output_dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--mp_parameters", type=str, default="")
    args, _ = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stdout)])
    set_seed(7)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label={i: str(i) for i in range(4)}, label2id={str(i): i for i in range(4)},
    )  # fmt: skip
    model = ViTForImageClassification(config)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        warmup_steps=args.warmup_steps,
        learning_rate=args.learning_rate,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="steps",
        logging_steps=1,
        remove_unused_columns=False,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        dataloader_drop_last=True,
        report_to=[],
        disable_tqdm=True,
        save_total_limit=3,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
        train_dataset=Pictures(32, 1),
        eval_dataset=Pictures(16, 2),
        callbacks=[Printer(), EarlyStoppingCallback(early_stopping_patience=5)],
    )
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    if last is not None:
        logger.info("***** continue training from %s *****", os.path.basename(last))
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        with open(os.path.join(args.output_dir, "eval_results.txt"), "w") as writer:
            for key, value in sorted(metrics.items()):
                writer.write(f"{key} = {value}\n")
        print(f"evaluated: loss: {metrics['eval_loss']:.6f} accuracy {metrics['eval_accuracy']}")
    trainer.save_model(os.path.join(args.output_dir, "final"))
    if trainer.is_world_process_zero():
        again = ViTForImageClassification.from_pretrained(os.path.join(args.output_dir, "final"))
        print(f"reloaded {sum(p.numel() for p in again.parameters())} parameters")


if __name__ == "__main__":
    main()
