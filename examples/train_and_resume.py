"""A language model that survives a kill: save, start again, go on, export.

    weft run -n 2 examples/train_and_resume.py
    weft run -n 2 --max-restarts 3 examples/train_and_resume.py --crash-at 25

Kill it whenever you like, and start it again, or let `--max-restarts` do that: it goes on after its last save, and
ends with the loss of a run that was never killed. `--crash-at 25` is such a kill. The exported file is read by plain
PyTorch, in one process.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from parts.small_gpt import SmallGPT
from torch.nn.functional import cross_entropy

import weft.torch as weft

VOCABULARY, LENGTH, BATCH, STEPS, SAVE_EVERY = 32, 16, 16, 40, 10


def language_model() -> SmallGPT:
    return SmallGPT(VOCABULARY, blocks=2, width=32, heads=4, context=LENGTH)


@weft.step
def train_step(model, ids, targets):
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--crash-at", type=int, metavar="STEP")
    options = parser.parse_args()

    weft.init({"partitions": 2, "microbatches": 4, "deterministic": True})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = weft.DistributedModel(language_model())
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    with weft.checkpoints(options.folder, every=SAVE_EVERY, also={"scheduler": scheduler}) as run:
        if run.step and weft.rank() == 0:
            print(f"going on after step {run.step}")
        for step in run.steps(STEPS):  # random states come back, too, so the data go on as well
            rows = (torch.randint(VOCABULARY, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
            optimizer.zero_grad()
            loss = train_step(model, rows[:, :-1], rows[:, 1:]).reduce_mean()
            optimizer.step()
            scheduler.step()
            if step == options.crash_at and weft.rank() == 1 and os.environ.get("WEFT_ATTEMPT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)

    if weft.rank() == 0:
        print(f"loss after step {STEPS}: {loss.item():.6f}")
        file = weft.export_checkpoint(options.folder, options.folder / "model.pt", "torch")
        plain = language_model()
        plain.load_state_dict(torch.load(file, weights_only=True))
        answer = plain(torch.arange(8).unsqueeze(0))[0, -1].argmax().item()
        print(f"after 0 1 ... 7 the exported model says {answer}")


if __name__ == "__main__":
    main()
