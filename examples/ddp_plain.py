"""A script for PyTorch's DistributedDataParallel. Nothing in it is weft's.

    weft run -n 2 examples/ddp_plain.py

`ddp_with_weft.py` is the same script with two other lines.
"""

import torch
import torch.distributed as dist
from parts.small_gpt import SmallGPT
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, BATCH, EPOCHS = 32, 16, 16, 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = TensorDataset((torch.randint(VOCABULARY, (256, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY)
    sampler = DistributedSampler(rows, seed=0)
    loader = DataLoader(rows, BATCH, sampler=sampler)
    model = DistributedDataParallel(SmallGPT(VOCABULARY, blocks=2, width=32, heads=4, context=LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model is gone, which holds the group
