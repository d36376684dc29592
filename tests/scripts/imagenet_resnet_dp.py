"""Image classification with PyTorch's DistributedDataParallel over smddp; the first rank evaluates alone."""

import argparse
import os
import shutil
import time
import warnings
from enum import Enum

import numpy as np
import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed
from torch.optim.lr_scheduler import MultiStepLR

best_acc1 = 0


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inplanes, planes, stride), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv3x3(planes, planes), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, 8), nn.BatchNorm2d(8)
        self.layer1, self.layer2 = BasicBlock(8, 8), BasicBlock(8, 16, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class Images(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        rng = np.random.RandomState(seed)
        self.labels = rng.randint(4, size=count)
        pictures = np.random.RandomState(99).randn(4, 3, 8, 8)
        self.images = (pictures[self.labels] + 0.7 * rng.randn(count, 3, 8, 8)).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index]), int(self.labels[index])


class Summary(Enum):
    NONE, AVERAGE, SUM, COUNT = range(4)


class AverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


class data_prefetcher:
    """Copies the next batch on a stream of its own while the present one is computed on."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.1, 0.1, 0.1]).cuda().view(1, 3, 1, 1)
        self.std = torch.cuda.FloatTensor([1.0, 1.0, 1.0]).view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= dist.get_world_size()
    return rt


def train(train_loader, model, criterion, optimizer, scaler, epoch, args):
    losses, top1, batch_time = (
        AverageMeter("Loss", ":.4e"),
        AverageMeter("Acc@1", ":6.2f"),
        AverageMeter("Time"),
    )
    model.train()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i, end = 0, time.time()
    while input is not None:
        torch.cuda.nvtx.range_push("iteration {}".format(i))
        with torch.cuda.amp.autocast(enabled=args.amp):
            output = model(input)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        (acc1,) = accuracy(output.data, target)
        reduced_loss = reduce_tensor(loss.data)
        losses.update(reduced_loss.item(), input.size(0))
        top1.update(reduce_tensor(acc1).item(), input.size(0))
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        batch_time.update(time.time() - end)
        end = time.time()
        if args.rank == 0 and i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {losses.val:.6f} {top1} {batch_time.count}"
            )
        input, target = prefetcher.next()
        i += 1


def validate(val_loader, model, criterion, args):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images = images.cuda(args.gpu, non_blocking=True)
            target = target.cuda(args.gpu, non_blocking=True)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0].cpu().item(), images.size(0))
    print(f" * rank {args.rank} Val loss {losses.avg:.6f} Acc@1 {top1.avg:.3f}")
    return top1.avg


def save_checkpoint(state, is_best, folder):
    filename = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, "model_best.pth.tar"))


def main():
    parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
    parser.add_argument("--data", metavar="DIR", default=os.environ.get("SM_CHANNEL_TRAINING", ""))
    parser.add_argument("-a", "--arch", metavar="ARCH", default="resnet18")
    parser.add_argument("-j", "--workers", default=1, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=16, type=int, help="over all processes")
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--all-evaluate", action="store_true")
    parser.add_argument("-p", "--print-freq", default=1, type=int)
    parser.add_argument("--dist-backend", default="smddp", type=str)
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    args = parser.parse_args()
    global best_acc1

    warnings.filterwarnings("ignore", category=UserWarning)
    torch.manual_seed(args.seed)
    cudnn.deterministic = True
    cudnn.benchmark = False
    dist.init_process_group(backend=args.dist_backend)
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.gpu)
    with torch.cuda.device(args.gpu):
        model = ResNet()
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.cuda(args.gpu).to(memory_format=memory_format)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    args.batch_size = int(args.batch_size / args.world_size)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], output_device=args.gpu)
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    scaler = torch.cuda.amp.GradScaler(init_scale=128.0, enabled=args.amp)
    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    train_dataset, val_dataset = Images(64, 1), Images(32, 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, shuffle=True, seed=4)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None), num_workers=args.workers,
        pin_memory=True, sampler=train_sampler, prefetch_factor=2 if args.workers else None,
    )  # fmt: skip
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=16, shuffle=False, pin_memory=True)
    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, scaler, epoch, args)
        if args.rank == 0 or args.all_evaluate:
            acc1 = validate(val_loader, model, criterion, args)
        if args.rank == 0:
            is_best = acc1 > best_acc1
            best_acc1 = max(acc1, best_acc1)
            scheduler_state = scheduler.state_dict()
            state = {
                "epoch": epoch + 1, "arch": args.arch, "state_dict": model.state_dict(), "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(), "scheduler": scheduler_state,
            }  # fmt: skip
            save_checkpoint(state, is_best, args.model_dir)
        scheduler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
