"""Tokens from files, read on the first rank of each pipeline only; the others learn how many batches there are."""

import glob
import json
import os

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch


class WorkerInitObj(object):
    def __init__(self, seed):
        self.seed = seed

    def __call__(self, id):
        np.random.seed(seed=self.seed + id)


class OpenwebtextPretraining(torch.utils.data.Dataset):
    def __init__(self, input_paths, max_sequence_length=None, dtype=np.int64):
        self.input_data = []
        for path in input_paths:
            with open(path) as f:
                self.input_data.extend([json.loads(ln) for ln in f])
        self.max_sequence_length, self.dtype = max_sequence_length, dtype

    def __len__(self):
        return len(self.input_data)

    def __getitem__(self, index):
        obj = self.input_data[index]
        iids = torch.as_tensor(np.array(obj["input_ids"], dtype=self.dtype))
        attns = torch.as_tensor(np.array(obj["attention_mask"], dtype=self.dtype))
        return iids[: self.max_sequence_length], attns[: self.max_sequence_length]


class DummyDataset(torch.utils.data.dataset.Dataset):
    def __init__(self, length, data_type="openwebtext"):
        self.length = length
        self.batch = (torch.Tensor(0), torch.Tensor(0))

    def __getitem__(self, index):
        return self.batch

    def __len__(self):
        return self.length


def write_tokens(folder, files=2, rows=24, length=16, vocabulary=64):
    os.makedirs(folder, exist_ok=True)
    random_state = np.random.RandomState(7)
    for number in range(files):
        with open(os.path.join(folder, f"{number}.jsonl.tmp"), "w") as f:
            for _ in range(rows):
                ids = (random_state.randint(vocabulary) + np.arange(length)) % vocabulary
                f.write(json.dumps({"input_ids": ids.tolist(), "attention_mask": [1] * length}) + "\n")
        os.replace(f.name, os.path.join(folder, f"{number}.jsonl"))


def create_pretraining_dataloader(
    input_paths, batch_size, max_sequence_length, seed, dp_rank, dp_size, shuffle=False
):
    if smp.pp_rank() == 0:
        data = OpenwebtextPretraining(input_paths=input_paths, max_sequence_length=max_sequence_length)
        sampler = torch.utils.data.DistributedSampler(
            data, shuffle=shuffle, seed=seed, rank=dp_rank, num_replicas=dp_size, drop_last=True
        )
        dataloader = torch.utils.data.DataLoader(
            data,
            sampler=sampler,
            batch_size=batch_size,
            num_workers=0,
            worker_init_fn=WorkerInitObj(seed),
            pin_memory=True,
            drop_last=True,
        )
        smp.broadcast(len(dataloader), smp.PP_GROUP)
    else:
        data_len = smp.recv_from(0, smp.RankType.PP_RANK)
        dataset = DummyDataset(data_len * batch_size)
        dataloader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=True)
    return dataloader


def paths_of(folder):
    return sorted(glob.glob(os.path.join(folder, "*.jsonl")))
