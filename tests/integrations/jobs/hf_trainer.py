"""Hugging Face's Trainer with one option a case; nothing but the first lines is about several processes.

usage: hf_trainer.py FOLDER BATCH EVALUATED CASE...
Prints a line RESULT with what each case logged, evaluated and wrote
"""

import functools
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore", category=FutureWarning)
if "RANK" in os.environ and "SM_HP_MP_PARAMETERS" not in os.environ:
    import weft.integrations.transformers

    weft.integrations.transformers.enable(**json.loads(os.environ.get("SETTINGS", '{"partitions": 2}')))

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

FOLDER, BATCH, EVALUATED, *CASES = sys.argv[1:]
WORDS, LENGTH = 32, 12
CASES_OF_ARGUMENTS = {
    "smoothing": {"label_smoothing_factor": 0.1},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 1},
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "workers": {"dataloader_num_workers": 2},
    "evaluated first": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2},
    "best": {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2,
        "load_best_model_at_end": True, "learning_rate": 0.05, "max_steps": 5,
    },
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """Sentences of which each has another number of labels that count, unless they are ``whole``."""

    def __init__(self, count, whole=False):
        generator = torch.Generator().manual_seed(3)
        self.ids = (torch.randint(WORDS, (count, 1), generator=generator) + torch.arange(LENGTH)) % WORDS
        self.labels = self.ids.clone()
        if not whole:
            for row, n in zip(
                self.labels, torch.randint(3, LENGTH, (count,), generator=generator), strict=True
            ):
                row[n:] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Classes(Tokens):
    def __getitem__(self, index):
        mask = (torch.arange(LENGTH) < 4 + index % 7).long()
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": self.ids[index][0] % 3}


class Padded(Tokens):
    """Sentences of 2 to 11 words, behind which there is padding."""

    def __getitem__(self, index):
        mask = (torch.arange(LENGTH) < 2 + index * 7 % 10).long()
        ids = self.ids[index]
        return {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }


class Pairs(Tokens):
    def __getitem__(self, index):
        ids = self.ids[index].clamp(min=2)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:6]}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Joined(Trainer):
    """Losses that join rows of the batch, by the scores of the rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        scores = outputs.logits[:, 0]
        loss = JOINED[self.args.run_name](scores) + 0.1 * scores.square().mean()  # biases have a gradient
        return (loss, outputs) if return_outputs else loss


def of_halves(scores):
    good, bad = scores.chunk(2)
    return -torch.nn.functional.logsigmoid(good - bad).mean()


JOINED = {
    "halves": of_halves,
    "evaluated first": of_halves,
    "a second one": of_halves,
    "thirds": lambda scores: (scores.chunk(3)[0] - scores.chunk(3)[1] * scores.chunk(3)[2]).square().mean(),
    "neighbours": lambda scores: -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean(),
    "contrasts": lambda scores: (3 * (scores[:, None] - scores)).exp().mean(),
    "like its reference": lambda scores: of_halves(scores - scores.detach()),  # log 2, whatever the pairs
}


def half_of_the_sum(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 0.5 * cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, loss_type="ForCausalLM",
        )
    )  # fmt: skip


def bert(labels=3):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=labels,
        )
    )  # fmt: skip


def t5():
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def doubled(rows):
    """Other rows behind these, so that there are always pairs; three times as many for thirds."""
    times = 3 if "thirds" in CASES else 2
    batch = default_data_collator(rows)
    moved = [(batch["input_ids"] + 5 * number) % WORDS for number in range(times)]
    return {"input_ids": torch.cat(moved), "labels": batch["labels"].repeat(times)}


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trainer_of(case, folder, known=None):
    set_seed(4)
    given = {
        "output_dir": folder, "per_device_train_batch_size": int(BATCH), "max_steps": 3, "learning_rate": 0.01,
        "per_device_eval_batch_size": int(BATCH), "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 4, "use_cpu": True, **CASES_OF_ARGUMENTS.get(case, {}),
    }  # fmt: skip
    cls, arguments, model, kind, extra = Trainer, TrainingArguments, gpt2, Tokens, {}
    whole = case == "own loss"
    if case == "padded":
        kind = Padded
    if case == "classes":
        model, kind, extra = bert, Classes, {"compute_metrics": accuracy}
    elif case == "generation":
        cls, arguments, model, kind = Seq2SeqTrainer, Seq2SeqTrainingArguments, t5, Pairs
        given |= {"predict_with_generate": True, "generation_max_length": 8}
    elif case == "own loss":
        cls = OwnLoss
    elif case in JOINED:
        cls, model, kind = Joined, functools.partial(bert, 1), Classes
        given |= {"run_name": case, "remove_unused_columns": False}
    elif case == "loss function":
        extra["compute_loss_func"] = half_of_the_sum
    elif case == "best":
        extra["callbacks"] = [EarlyStoppingCallback(2)]
    module = known or model()
    if case == "own optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        extra["optimizers"] = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return cls(
        model=module, args=arguments(**given), train_dataset=kind(32, whole), eval_dataset=kind(int(EVALUATED), whole),
        data_collator=doubled if case in JOINED else default_data_collator, **extra,
    )  # fmt: skip


def result_of(case):
    folder = os.path.join(FOLDER, case.replace(" ", "_"))
    trainer = trainer_of(case, folder)
    computed = []
    if case == "padded":
        trainer.model.transformer.wte.register_forward_pre_hook(
            lambda m, args: computed.append(args[0].numel())
        )
    trainer.train()
    positions = sum(computed)
    if case == "a second one":
        trainer = trainer_of(case, folder, trainer.model)
        trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(os.path.join(folder, "final"))
    names = ("loss", "grad_norm", "eval_loss", "learning_rate")
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {
        "logged": [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history],
        "evaluated": {key: evaluated[key] for key in ("eval_loss", "eval_accuracy") if key in evaluated},
        "predicted": [list(logits.shape), float(abs(logits).sum()), predicted.label_ids.tolist()],
        "written": sorted(os.listdir(folder)),
    } | ({"positions": positions} if case == "padded" else {})


print("RESULT", json.dumps({case: result_of(case) for case in CASES}))
