"""Hugging Face's Trainer with a model that weft splits.

    weft run -n 2 examples/train_trainer.py

The two lines of weft stand at the top; all else is what it would be in one process.
"""

import tempfile

import torch
import transformers

import weft.integrations.transformers

weft.integrations.transformers.enable(partitions=2)

VOCABULARY, LENGTH = 32, 16


class Runs(torch.utils.data.Dataset):
    """Consecutive numbers, so that the next one can be told from the last; some are cut short."""

    def __init__(self, count: int) -> None:
        starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(count))
        self.ids = (starts + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[LENGTH - index % 5 :] = -100 if index % 5 else labels[LENGTH:]
        return {"input_ids": self.ids[index], "labels": labels}


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            num_train_epochs=4,
            label_smoothing_factor=0.1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Runs(512),
            eval_dataset=Runs(50),
            data_collator=transformers.default_data_collator,
        )
        trainer.train()
    losses = [round(entry["eval_loss"], 3) for entry in trainer.state.log_history if "eval_loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss of the evaluation, epoch by epoch: {losses}")
    if not losses[-1] < 0.8 * losses[0]:
        raise SystemExit("it did not learn to count")


if __name__ == "__main__":
    main()
