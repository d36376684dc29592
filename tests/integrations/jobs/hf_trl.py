"""TRL's trainers of preferences and rewards, with and without an adapter of PEFT.

usage: hf_trl.py FOLDER KIND...
Prints a line RESULT with the losses and the norms of gradients that each kind logged
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
if "RANK" in os.environ:
    import weft.integrations.transformers

    weft.integrations.transformers.enable(partitions=2)

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.kto import KTOConfig, KTOTrainer

FOLDER, *KINDS = sys.argv[1:]
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ."]
GOOD = ["the cat sat on the mat.", "a dog ran.", "many birds sing in the morning.", "rain falls."] * 4
BAD = ["mat the on.", "dog dog dog.", "no.", "xyzzy rain."] * 4
PROMPTS = ["say: "] * len(GOOD)


class Fixed(GRPOTrainer):
    """The completions are drawn here: split or not, a model would draw others from its logits."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        length = range(3, 8)
        return [[3 + (7 * n + 5 * m) % 26 for m in length[: 3 + n % 3]] for n in range(len(prompt_ids))], None


class Generating(GRPOTrainer):
    """The model generates the completions, in the step, from a seed that is the same in one process."""

    def _generate_single_turn(self, *args, **kwargs):
        torch.manual_seed(self.state.global_step)
        return super()._generate_single_turn(*args, **kwargs)


def tokenizer():
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(cls, **more):
    return cls(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **more,
        )
    )  # fmt: skip


def on_disk(rows):
    """The rows where all ranks find what one of them puts beside them; each has its own place for rows in memory."""
    folder, new = Path(FOLDER) / "rows", Path(FOLDER) / "new"
    if os.environ.get("RANK", "0") == "0":
        rows.save_to_disk(new)
        new.rename(folder)
    while not folder.exists():
        time.sleep(0.05)
    return load_from_disk(folder)


def trainer_of(kind):
    set_seed(1)
    pairs = Dataset.from_dict({"prompt": PROMPTS, "chosen": GOOD, "rejected": BAD})
    judged = {"prompt": PROMPTS * 2, "completion": GOOD + BAD, "label": [True] * 16 + [False] * 16}
    before = kind == "dpo before"
    name, _, adapter = kind.removesuffix(" before").partition(" ")
    common = {
        "output_dir": FOLDER, "per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "learning_rate": 0.01, "optim": "sgd",
    }  # fmt: skip
    more = {"processing_class": tokenizer()}
    if adapter == "adapter":
        task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    if name == "dpo":
        more["ref_model"] = None if adapter else llama(LlamaForCausalLM)
        args = DPOConfig(precompute_ref_log_probs=before, **common)
        rows = on_disk(pairs) if before else pairs
        return DPOTrainer(llama(LlamaForCausalLM), args=args, train_dataset=rows, **more)
    if name == "reward":
        model = llama(LlamaForSequenceClassification, num_labels=1)
        return RewardTrainer(
            model, args=RewardConfig(**common), train_dataset=pairs.remove_columns("prompt"), **more
        )
    if name == "kto":
        return KTOTrainer(
            llama(LlamaForCausalLM), llama(LlamaForCausalLM), args=KTOConfig(**common),
            train_dataset=Dataset.from_dict(judged).shuffle(seed=1), **more,
        )  # fmt: skip
    return (Generating if kind == "grpo generating" else Fixed)(
        llama(LlamaForCausalLM), reward_funcs=lambda completions, **others: [len(set(c)) for c in completions],
        args=GRPOConfig(num_generations=4, max_completion_length=8, **common),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), **more,
    )  # fmt: skip


found = {}
for kind in KINDS:
    trainer = trainer_of(kind)
    trainer.train()
    found[kind] = [
        [entry[name] for name in ("loss", "grad_norm")] for entry in trainer.state.log_history[:-1]
    ]
print("RESULT", json.dumps(found))
