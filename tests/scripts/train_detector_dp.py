"""A detector over pictures of several sizes: lists of tensors and of dicts, losses in a dict, results gathered."""

import argparse
import datetime
import math
import os
import pickle
import random
import sys
import time
from collections import defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
from torch import nn

try:
    import smdistributed.dataparallel.torch.distributed as dist
except ImportError:
    import torch.distributed as dist


def get_world_size():
    if not dist.is_available():
        return 1
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def is_main_process():
    return get_world_size() == 1 or dist.get_rank() == 0


def all_gather(data):
    """Any picklable object, from all processes: as bytes in tensors, padded to the longest."""
    world_size = get_world_size()
    if world_size == 1:
        return [data]
    buffer = pickle.dumps(data)
    storage = torch.ByteStorage._from_buffer(buffer) if hasattr(torch.ByteStorage, "_from_buffer") else None
    tensor = torch.ByteTensor(storage if storage is not None else list(buffer)).to("cuda")
    local_size = torch.LongTensor([tensor.numel()]).to("cuda")
    size_list = [torch.LongTensor([0]).to("cuda") for _ in range(world_size)]
    dist.all_gather(size_list, local_size)
    size_list = [int(size.item()) for size in size_list]
    max_size = max(size_list)
    tensor_list = [torch.cuda.ByteTensor(size=(max_size,)) for _ in size_list]
    if tensor.numel() != max_size:
        padding = torch.ByteTensor(size=(max_size - tensor.numel(),)).to("cuda")
        tensor = torch.cat((tensor, padding), dim=0)
    dist.all_gather(tensor_list, tensor)
    return [pickle.loads(t.cpu().numpy().tobytes()[:size]) for size, t in zip(size_list, tensor_list)]  # noqa: B905


def reduce_dict(input_dict, average=True):
    world_size = get_world_size()
    if world_size < 2:
        return input_dict
    with torch.no_grad():
        names = sorted(input_dict.keys())
        values = torch.stack([input_dict[k] for k in names], dim=0)
        dist.all_reduce(values)
        if average:
            values /= world_size
        return {k: v for k, v in zip(names, values)}  # noqa: B905, C416


class SmoothedValue(object):
    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64, device="cuda")
        dist.barrier()
        dist.all_reduce(t)
        t = t.tolist()
        self.count, self.total = int(t[0]), t[1]

    @property
    def global_avg(self):
        return self.total / self.count


class ImageList(object):
    def __init__(self, tensors, image_sizes):
        self.tensors, self.image_sizes = tensors, image_sizes

    def to(self, *args, **kwargs):
        return ImageList(self.tensors.to(*args, **kwargs), self.image_sizes)


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class Detector(nn.Module):
    """One box and one class for each place of a grid; a head that training does not use is there as well."""

    def __init__(self, classes=3, stride=4):
        super().__init__()
        self.stride = stride
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            FrozenBatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(),
        )
        self.cls_head, self.box_head = nn.Conv2d(16, classes + 1, 1), nn.Conv2d(16, 4, 1)
        self.mask_head = nn.Conv2d(16, 1, 1)

    def transform(self, images):
        size = [max(image.shape[d] for image in images) for d in (1, 2)]
        size = [int(math.ceil(s / self.stride) * self.stride) for s in size]
        batched = images[0].new_zeros((len(images), 3, *size))
        for image, pad in zip(images, batched):  # noqa: B905
            pad[: image.shape[0], : image.shape[1], : image.shape[2]].copy_(image)
        return ImageList(batched, [image.shape[-2:] for image in images])

    def assign(self, targets, shape, device):
        labels = torch.zeros(len(targets), *shape, dtype=torch.int64, device=device)
        boxes = torch.zeros(len(targets), 4, *shape, device=device)
        for i, target in enumerate(targets):
            for box, label in zip(target["boxes"], target["labels"]):  # noqa: B905
                cx = ((box[0] + box[2]) / 2 / self.stride).long().clamp(max=shape[1] - 1)
                cy = ((box[1] + box[3]) / 2 / self.stride).long().clamp(max=shape[0] - 1)
                labels[i, cy, cx] = label
                boxes[i, :, cy, cx] = box / self.stride
        return labels, boxes

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("In training mode, targets should be passed")
        original_image_sizes = [img.shape[-2:] for img in images]
        images = self.transform(images)
        features = self.backbone(images.tensors)
        scores, boxes = self.cls_head(features), self.box_head(features)
        if self.training:
            labels, wanted = self.assign(targets, features.shape[-2:], features.device)
            found = (labels > 0).unsqueeze(1)
            number = max(int(found.sum()), 1)
            return {
                "loss_classifier": F.cross_entropy(scores, labels),
                "loss_box_reg": (F.smooth_l1_loss(boxes, wanted, reduction="none") * found).sum()
                / number
                / 10,
            }
        detections = []
        for score, box, size in zip(scores.softmax(1), boxes, original_image_sizes):  # noqa: B905
            best, label = score[1:].flatten(1).max(1)
            detections.append(
                {"boxes": box.flatten(1)[:, label].T, "scores": best, "labels": label, "size": size}
            )
        return detections


class Shapes(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.RandomState(self.seed * 1000 + i)
        h, w = rng.randint(16, 33), rng.randint(16, 33)
        image = 0.1 * torch.from_numpy(rng.randn(3, h, w).astype(np.float32))
        boxes, labels = [], []
        for _ in range(rng.randint(1, 4)):
            x, y, s = rng.randint(0, w - 8), rng.randint(0, h - 8), rng.randint(4, 8)
            label = rng.randint(1, 4)
            image[label - 1, y : y + s, x : x + s] += 1.0
            boxes.append([x, y, x + s, y + s])
            labels.append(label)
        target = {
            "boxes": torch.as_tensor(boxes, dtype=torch.float32),
            "labels": torch.as_tensor(labels, dtype=torch.int64),
            "image_id": torch.tensor([i]),
            "iscrowd": torch.zeros((len(boxes),), dtype=torch.int64),
        }
        return image, target


def collate_fn(batch):
    return tuple(zip(*batch))  # noqa: B905


def train_one_epoch(model, optimizer, data_loader, device, epoch, scaler=None):
    model.train()
    meters = defaultdict(SmoothedValue)
    warmup = None
    if epoch == 0:
        factor, iters = 1.0 / 10, min(1000, len(data_loader) - 1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=factor, total_iters=iters)
    for number, (images, targets) in enumerate(data_loader):
        images = list(image.to(device) for image in images)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        with torch.cuda.amp.autocast(enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        reduced = reduce_dict(loss_dict)
        loss_value = sum(loss for loss in reduced.values()).item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        if warmup is not None:
            warmup.step()
        for k, v in {"loss": loss_value, **reduced}.items():
            meters[k].update(float(v))
        megabytes = torch.cuda.max_memory_allocated() / 1024.0 / 1024.0
        if is_main_process():
            print(
                f"Epoch: [{epoch}] [{number}/{len(data_loader)}] loss: {loss_value:.6f} lr: "
                f"{optimizer.param_groups[0]['lr']:.6f} max mem: {megabytes:.0f}"
            )
    return meters


@torch.no_grad()
def evaluate(model, data_loader, device):
    model.eval()
    cpu_device = torch.device("cpu")
    results = {}
    for images, targets in data_loader:
        images = list(img.to(device) for img in images)
        torch.cuda.synchronize()
        outputs = model(images)
        outputs = [{k: v.to(cpu_device) if torch.is_tensor(v) else v for k, v in t.items()} for t in outputs]
        for target, output in zip(targets, outputs):  # noqa: B905
            results[target["image_id"].item()] = float(output["scores"].sum())
    merged = {}
    for part in all_gather(results):
        merged.update(part)
    return len(merged), sum(merged[k] for k in sorted(merged))


def main(args):
    if args.distributed:
        dist.init_process_group()
        args.gpu = dist.get_local_rank() if hasattr(dist, "get_local_rank") else int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(args.gpu)
    device = torch.device(args.device)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    dataset, dataset_test = Shapes(24, 1), Shapes(7, 2)
    world, rank = get_world_size(), dist.get_rank() if args.distributed else 0
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, world, rank, shuffle=False)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, world, rank, shuffle=False)
    batch_sampler = torch.utils.data.BatchSampler(sampler, args.batch_size, drop_last=True)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=batch_sampler, num_workers=args.workers, collate_fn=collate_fn
    )
    data_loader_test = torch.utils.data.DataLoader(
        dataset_test, batch_size=1, sampler=test_sampler, num_workers=args.workers, collate_fn=collate_fn
    )
    model = Detector()
    model.to(device)
    model_without_ddp = model
    if args.distributed:
        model = DDP(model, device_ids=[args.gpu], broadcast_buffers=False, find_unused_parameters=True)
        model_without_ddp = model.module
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    scaler = torch.cuda.amp.GradScaler() if args.amp else None
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        args.start_epoch = checkpoint["epoch"] + 1
    start_time = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        meters = train_one_epoch(model, optimizer, data_loader, device, epoch, scaler)
        lr_scheduler.step()
        if args.output_dir and is_main_process():
            checkpoint = {
                "model": model_without_ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "args": args,
                "epoch": epoch,
            }
            torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
        count, score = evaluate(model, data_loader_test, device)
        if args.distributed:
            for meter in meters.values():
                meter.synchronize_between_processes()
        if is_main_process():
            print(
                f"epoch {epoch}: average loss {meters['loss'].global_avg:.6f}, {count} images, score {score:.6f}"
            )
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time)) is not None}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--device", default="cuda", type=str)
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--start_epoch", default=0, type=int)
    parser.add_argument("-j", "--workers", default=0, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--output-dir", default=os.environ.get("SM_MODEL_DIR", "."), type=str)
    parser.add_argument("--amp", action="store_true")
    arguments = parser.parse_args()
    arguments.distributed = dist.is_available()
    main(arguments)
