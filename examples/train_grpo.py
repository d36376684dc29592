"""TRL's GRPO with a model that weft splits, and that generates its own completions.

    weft run -n 2 examples/train_grpo.py

In one process, `python examples/train_grpo.py`, it draws the same completions and trains to the same weights.
"""

import os
import tempfile

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

import weft.integrations.transformers

if "RANK" in os.environ:
    weft.integrations.transformers.enable(partitions=2)

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh "]
PROMPTS = ["a b c ", "b a d ", "c c a ", "d b b "] * 8


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each letter."""
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def share_of_e(completions: list[str], **others: object) -> list[float]:
    """The reward: the share of a completion that is the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]


class Trainer(GRPOTrainer):
    """It draws completions from a seed for each step: so they are those of one process."""

    def _generate_single_turn(self, *args, **kwargs):
        torch.manual_seed(self.state.global_step)
        return super()._generate_single_turn(*args, **kwargs)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
            max_steps=12, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = Trainer(
            transformers.LlamaForCausalLM(config),
            reward_funcs=share_of_e,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer(),
        )
        trainer.train()
    rewards = [round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        print(f"mean reward, step by step: {rewards}")
    if not sum(rewards[-3:]) > 1.5 * sum(rewards[:3]):
        raise SystemExit("it did not learn to write e")


if __name__ == "__main__":
    main()
