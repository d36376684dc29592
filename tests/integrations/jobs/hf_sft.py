"""TRL's SFTTrainer, with an adapter of PEFT; the first run saves, the second goes on from there.

usage: hf_sft.py FOLDER [CHECKPOINT]
"""

import json
import os
import sys
import warnings

warnings.filterwarnings("ignore", category=FutureWarning)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, set_seed

if "RANK" in os.environ:
    import weft.integrations.transformers

    weft.integrations.transformers.enable(partitions=2)  # after the import of the Trainer

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

FOLDER, *CHECKPOINT = sys.argv[1:]
LETTERS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ."]
TEXTS = ["the cat sat on the mat.", "a dog ran.", "many birds sing in the morning.", "rain falls."] * 8

letters = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="<unk>"))
letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
set_seed(1)
trainer = SFTTrainer(
    model=LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        )
    ),
    args=SFTConfig(
        output_dir=FOLDER, per_device_train_batch_size=8, per_device_eval_batch_size=5, max_steps=4, logging_steps=1,
        learning_rate=0.01, report_to=[], disable_tqdm=True, save_steps=2, use_cpu=True, bf16=False,
        gradient_checkpointing=False, eval_strategy="steps", eval_steps=2,
    ),
    train_dataset=Dataset.from_dict({"text": TEXTS}),
    eval_dataset=Dataset.from_dict({"text": TEXTS[:7]}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)  # fmt: skip
assert isinstance(trainer, Trainer)
trainer.train(resume_from_checkpoint=CHECKPOINT[0] if CHECKPOINT else None)
names = ("loss", "grad_norm", "eval_loss", "num_tokens")
print("RESULT", json.dumps([[entry.get(name) for name in names] for entry in trainer.state.log_history[:-1]]))
