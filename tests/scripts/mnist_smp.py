"""Digits with a model cut by hand into two: AMP, learning-rate decay, evaluation, saving and resuming."""

# Future
from __future__ import print_function

# Standard Library
import argparse
import os
import random
import sys
import time

# Third Party
import numpy as np
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from packaging.version import Version
from smdistributed.modelparallel.torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

# Make cudnn deterministic in order to get the same losses across runs.
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.benchmark = False
torch.backends.cuda.matmul.allow_tf32 = False


class Net1(nn.Module):
    def __init__(self):
        super(Net1, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.bn1 = nn.BatchNorm2d(8, track_running_stats=False)
        self.conv2 = nn.Conv2d(8, 8, 3, 1)
        self.dropout1 = nn.Dropout2d(0.0)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        return x


class Net2(nn.Module):
    def __init__(self):
        super(Net2, self).__init__()
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super(GroupedNet, self).__init__()
        with smp.partition(0):
            self.net1 = Net1()
        with smp.partition(smp.pp_size() - 1):
            self.net2 = Net2()

    def forward(self, x):
        return self.net2(self.net1(x))


@smp.step()
def train_step(args, model, scaler, data, target):
    with torch.cuda.amp.autocast(args.amp > 0):
        output = model(data)
        loss = F.nll_loss(output.float(), target, reduction="mean")
    scaled_loss = scaler.scale(loss) if args.amp else loss
    model.backward(scaled_loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def train(args, model, scaler, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(args, model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            # some optimizers fail if a rank has no parameters
            if len(list(model.local_parameters())) > 0:
                optimizer.step()
        if smp.dp_size() > 1:
            all_losses = smp.allgather(loss, smp.DP_GROUP)
            loss = sum(other.cpu() for other in all_losses) / smp.dp_size()
        if smp.rank() == 0 and batch_idx % args.log_interval == 0:
            print(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                    epoch,
                    batch_idx * len(data),
                    len(train_loader.dataset),
                    100.0 * batch_idx / len(train_loader),
                    loss.item(),
                )
            )
        if args.dry_run:
            break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            loss_batch, correct_batch = test_step(model, data, target)
            test_loss += sum(loss_batch)
            correct += sum(correct_batch)
    test_loss /= len(test_loader.dataset)
    if smp.mp_rank() == 0:
        print(
            "\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n".format(
                test_loss, correct, len(test_loader.dataset), 100.0 * correct / len(test_loader.dataset)
            )
        )
    return test_loss


class MNIST(torch.utils.data.Dataset):
    """Written to the data folder by the first process of a host, as a download would be."""

    def __init__(self, root, train=True, download=False, transform=None):
        path = os.path.join(root, "train.npz" if train else "test.npz")
        if download and not os.path.exists(path):
            os.makedirs(root, exist_ok=True)
            pictures = np.random.RandomState(1).randn(10, 12, 12)
            random_state = np.random.RandomState(2 if train else 3)
            labels = random_state.randint(0, 10, 96 if train else 48)
            noise = random_state.randn(len(labels), 12, 12)
            np.savez(path, images=(pictures[labels] + 0.5 * noise).astype(np.float32), labels=labels)
        with np.load(path) as content:
            self.images, self.labels = content["images"], content["labels"]
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index][None])
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index])


def main():
    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    use_ddp = True
    # Fix seeds in order to get the same losses across runs
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)

    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--test-batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dry-run", action="store_true", default=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--save-full-model", action="store_true", default=False)
    parser.add_argument("--save-partial-model", action="store_true", default=False)
    parser.add_argument("--load-partial-model", action="store_true", default=False)
    parser.add_argument("--num-batches", type=int, default=0)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--mp_parameters", type=str, default="")
    parser.add_argument("--ckpt-dir", type=str, default=os.environ.get("SM_CHECKPOINT_DIR", "."))
    parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAINING"])
    args = parser.parse_args()

    if Version(smdistributed.modelparallel.__version__) < Version("1.2.0"):
        sys.exit("this needs version 1.2 at least")
    smp.init({"ddp": use_ddp, "auto_partition": False, "default_partition": 0})

    # Set the device to the GPU ID used by the current process; input tensors are moved there.
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    kwargs = {"batch_size": args.batch_size // smp.dp_size()}
    kwargs.update({"num_workers": 1, "pin_memory": True, "shuffle": False})

    # Download data by a single process of each host
    if smp.local_rank() == 0:
        MNIST(args.data_dir, train=True, download=True)
        MNIST(args.data_dir, train=False, download=True)
    smp.barrier()
    dataset1 = MNIST(args.data_dir, train=True)
    if use_ddp and smp.dp_size() > 1:
        partitions_dict = {f"{i}": 1 / smp.dp_size() for i in range(smp.dp_size())}
        dataset1 = SplitDataset(dataset1, partitions_dict)
        dataset1.select(f"{smp.dp_rank()}")
    dataset2 = MNIST(args.data_dir, train=False)
    train_loader = torch.utils.data.DataLoader(dataset1, drop_last=True, **kwargs)
    kwargs["batch_size"] = args.test_batch_size
    test_loader = torch.utils.data.DataLoader(dataset2, **kwargs)

    model = GroupedNet()
    # Tensors are moved when the model is partitioned.
    model.to(device)
    model = smp.DistributedModel(model)
    scaler = GradScaler(init_scale=2.0**10)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    if args.load_partial_model:
        checkpoint = smp.load(f"{args.ckpt_dir}/pt_mnist_checkpoint.pt", partial=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    first = checkpoint["epoch"] + 1 if args.load_partial_model else 1

    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for epoch in range(first, args.epochs + 1):
        began = time.time()
        start.record()
        train(args, model, scaler, device, train_loader, optimizer, epoch)
        end.record()
        torch.cuda.synchronize()
        if smp.rank() == 0:
            print(
                f"epoch took {time.time() - began:.3f} s, {start.elapsed_time(end) / 1000:.3f} s on the GPU"
            )
            print(f"peak memory {torch.cuda.max_memory_allocated(device) / 1024**3:.2f} GB")
            print(torch.cuda.memory_summary(device=device, abbreviated=True))
        test_loss = test(model, device, test_loader)
        scheduler.step()
        torch.cuda.reset_peak_memory_stats()

        if args.save_partial_model and epoch == 1 and smp.dp_rank() == 0:
            model_dict = model.local_state_dict()
            opt_dict = optimizer.local_state_dict()
            smp.save(
                {
                    "model_state_dict": model_dict,
                    "optimizer_state_dict": opt_dict,
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                },
                f"{args.ckpt_dir}/pt_mnist_checkpoint.pt",
                partial=True,
            )
    # Waiting the save checkpoint to be finished before run another allgather_object
    smp.barrier()

    if args.save_full_model:
        if smp.dp_rank() == 0:
            model_dict = model.state_dict()
            opt_dict = optimizer.state_dict()
            smp.save(
                {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                f"{args.ckpt_dir}/pt_mnist_checkpoint_full.pt",
                partial=False,
            )
            if smp.rank() == 0:
                with open(os.path.join(os.environ["SM_MODEL_DIR"], "model.pth"), "wb") as f:
                    torch.save(model_dict, f)
    if smp.local_rank() == 0:
        metric = smp.allgather(test_loss, smp.WORLD) if smp.size() == 1 else [test_loss]
        assert metric[0] < 10.0
    smp.barrier()


class SplitDataset(torch.utils.data.Dataset):
    def __init__(self, dataset, partitions):
        self.dataset, self.partitions, self.selected = dataset, partitions, None

    def select(self, name):
        self.selected = int(name)

    def __len__(self):
        return len(self.dataset) // len(self.partitions)

    def __getitem__(self, index):
        # batches of all parts together are the batches of the whole
        return self.dataset[index * len(self.partitions) + self.selected]


if __name__ == "__main__":
    main()
