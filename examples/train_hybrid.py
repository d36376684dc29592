"""Two copies of a model, each split over two processes: a pipeline and data parallelism at once.

    weft run -n 4 examples/train_hybrid.py

Four processes and two partitions make two copies. Only the data know of it: each copy reads its own shard, and the two
processes of a copy read the same rows.
"""

import torch
from parts.small_gpt import SmallGPT
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft.torch as weft

VOCABULARY, LENGTH, BATCH, EPOCHS = 32, 16, 16, 4


@weft.step
def train_step(model, ids, targets):
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


def main() -> None:
    weft.init({"partitions": 2, "microbatches": 4})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = TensorDataset((torch.randint(VOCABULARY, (256, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY)
    sampler = weft.shared_sampler(rows)  # one shuffle, divided among the copies
    loader = DataLoader(rows, BATCH, sampler=sampler, drop_last=True)
    weft.check_loader(loader)
    model = weft.DistributedModel(SmallGPT(VOCABULARY, blocks=4, width=32, heads=4, context=LENGTH))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            optimizer.zero_grad()
            loss = train_step(model, ids[:, :-1], ids[:, 1:]).reduce_mean()
            optimizer.step()
            losses.append(loss.item())
        copies = weft.allgather(losses[-1], weft.DP_GROUP)  # a loss is that of one copy's rows
        if weft.rank() == 0:
            print(
                f"epoch {epoch}  losses of the copies {' '.join(f'{each:.3f}' for each in copies)}",
                flush=True,
            )
    held = f"copy {weft.dp_rank()} of {weft.dp_size()}, partition {weft.pp_rank()} of {weft.pp_size()}"
    print(f"rank {weft.rank()} is {held}", flush=True)
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
