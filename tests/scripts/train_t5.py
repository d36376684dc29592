"""T5 with an encoder and a decoder: embeddings shared by three modules, seq2seq batches in a dict, Adafactor."""

import argparse
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Adafactor, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration
from transformers.optimization import AdafactorSchedule

IGNORE = -100


@smp.step
def train_step(args, model, batch, scaler=None):
    with torch.cuda.amp.autocast(enabled=args.amp, dtype=torch.bfloat16):
        outputs = model(**batch)
    loss = outputs.loss if hasattr(outputs, "loss") else outputs[0]
    model.backward(loss)
    return {"loss": loss, "logits": outputs["logits"]}


@smp.step
def generate_free_step(model, batch):
    outputs = model(**batch)
    return outputs.loss, outputs.logits.argmax(dim=-1)


class Reversal(Dataset):
    """The target is the source backwards; lengths differ."""

    def __init__(self, count, seed):
        self.random = random.Random(seed)
        self.items = []
        for _ in range(count):
            ids = [self.random.randrange(3, 32) for _ in range(self.random.randrange(4, 9))]
            self.items.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids[::-1] + [1]})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pad(rows, value):
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class Collate:
    def __call__(self, features):
        return {
            "input_ids": pad([f["input_ids"] for f in features], 0),
            "attention_mask": pad([f["attention_mask"] for f in features], 0),
            "labels": pad([f["labels"] for f in features], IGNORE),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_batch_size", "-b", type=int, default=8)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--optim", default="adamw", choices=["adamw", "adafactor"])
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--output_data_dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
    parser.add_argument("--model_dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--gpus", type=int, default=int(os.environ["SM_NUM_GPUS"]))
    parser.add_argument("--hosts", type=str, default=os.environ["SM_HOSTS"])
    parser.add_argument("--partitions", type=int, default=2)
    args = parser.parse_args()
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": 2,
            "ddp": True,
            "pipeline": "simple",
            "contiguous": True,
        }
    )
    assert args.gpus >= smp.local_size() and os.environ["SM_CURRENT_HOST"] in args.hosts
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    device = torch.device(f"cuda:{smp.local_rank()}")
    torch.cuda.set_device(device)

    config = T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).to(device)
    model = smp.DistributedModel(model)
    if args.optim == "adafactor":
        optimizer = Adafactor(
            model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None
        )
        scheduler = AdafactorSchedule(optimizer)
        optimizer = smp.DistributedOptimizer(optimizer)
    else:
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda s: 1.0 / (1.0 + s))

    assert DataCollatorForSeq2Seq is not None
    data = Reversal(32, 1)
    rows = list(range(smp.dp_rank(), len(data), smp.dp_size()))
    loader = DataLoader(
        torch.utils.data.Subset(data, rows),
        batch_size=args.per_device_batch_size,
        collate_fn=Collate(),
        drop_last=True,
    )
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            out = train_step(args, model, batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loss = out["loss"].reduce_mean().item()
            accuracy = (out["logits"].concat().argmax(-1) == batch["labels"]).float().mean().item()
            if smp.dp_size() > 1:
                loss = float(np.mean(smp.allgather(loss, smp.DP_GROUP)))
            if smp.rank() == 0:
                print(f"epoch {epoch} step {step} train_loss={loss:.6f} acc={accuracy:.3f}", flush=True)
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(DataLoader(Reversal(8, 2), batch_size=8, collate_fn=Collate())):
                loss, predicted = generate_free_step(model, {k: v.cuda() for k, v in batch.items()})
                if smp.rank() == 0:
                    print(
                        f"epoch {epoch} eval_loss={loss.reduce_mean().item():.6f} {tuple(predicted.stack().shape)}"
                    )
    if smp.dp_rank() == 0:
        state = model.state_dict()
        if smp.mp_rank() == 0:
            T5ForConditionalGeneration(config).load_state_dict(state)
            torch.save(state, os.path.join(args.model_dir, "pytorch_model.bin"))
            with open(os.path.join(args.output_data_dir, "eval_results.txt"), "w") as writer:
                writer.write(f"loss = {loss.reduce_mean().item()}\n")
    smp.barrier(smp.WORLD)


if __name__ == "__main__":
    main()
