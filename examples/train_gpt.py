"""Training as a user writes it: any model, one `weft.step`, an optimizer.

    weft run -n 2 examples/train_gpt.py

The GPT in `parts/small_gpt.py` knows nothing of weft. It learns to count: each row is a run of
consecutive numbers, so the next one can be told from the last.
"""

import torch
from parts.small_gpt import SmallGPT
from torch.nn.functional import cross_entropy

import weft.torch as weft

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 16, 40


@weft.step
def train_step(model, ids, targets):
    logits = model(ids)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


def main() -> None:
    weft.init({"partitions": 2, "microbatches": 4})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = weft.DistributedModel(SmallGPT(VOCABULARY, blocks=4, width=64, heads=4, context=LENGTH))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    losses = []
    for step in range(STEPS):
        rows = (torch.randint(VOCABULARY, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
        optimizer.zero_grad()
        loss = train_step(model, rows[:, :-1], rows[:, 1:]).reduce_mean()
        optimizer.step()
        losses.append(loss.item())
        if weft.rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}", flush=True)
    if weft.rank() == 0:
        print(weft.partition_report())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
