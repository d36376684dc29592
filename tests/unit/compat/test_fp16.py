"""16-bit training with 32-bit masters: what is saved goes on bit for bit, in weft's format and in older files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft.torch as weft
from weft.compat.modelparallel.model import DistributedModel
from weft.compat.modelparallel.optimizer import DistributedOptimizer
from weft.compat.modelparallel.session import init
from weft.errors import CheckpointError, UsageError
from weft.torch.optimizer import MASTERS, SCALE


@pytest.fixture(autouse=True)
def job():
    yield
    weft.shutdown()


class Job:
    """A small model in training, from the beginning of a process on."""

    def __init__(self, seed: int = 0) -> None:
        weft.shutdown()
        init({"fp16": True})
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.model = DistributedModel(net)
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
        self.optimizer = DistributedOptimizer(
            torch.optim.AdamW(groups, lr=1e-3),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 64.0, "scale_window": 3},
        )
        self.step = weft.step(self._step)

    def _step(self, model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for number in range(first, first + steps):
            torch.manual_seed(100 + number)
            self.optimizer.zero_grad()
            losses.append(self.step(self.model, torch.randn(8, 4)).reduce_mean().item())
            self.optimizer.step()
        return losses

    def now(self) -> dict[str, torch.Tensor]:
        masters = {
            f"master {n}": high.detach().clone() for n, (_, high) in enumerate(self.optimizer.masters())
        }
        scale = torch.tensor(self.optimizer.loss_scale)
        return {**{k: v.clone() for k, v in self.model.state_dict().items()}, **masters, "scale": scale}


def assert_same(one, other):
    assert list(one) == list(other) and len(one) == 9
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_job_goes_on_bit_for_bit(tmp_path):
    job = Job()
    job.train(0, 4)
    weft.save_checkpoint(tmp_path, "a", model=job.model, optimizer=job.optimizer)
    weft.save({"model": job.model.local_state_dict(), "optimizer": job.optimizer.local_state_dict()},
              str(tmp_path / "files"))  # fmt: skip
    losses, expected = job.train(4, 4), job.now()
    assert any((high != high.half()).any() for name, high in expected.items() if name.startswith("master"))
    weft.resume_from_checkpoint(tmp_path)  # the masters that are there follow too
    assert job.train(4, 4) == losses
    assert_same(job.now(), expected)

    job = Job(1)
    weft.resume_from_checkpoint(tmp_path)
    assert job.train(4, 4) == losses
    assert_same(job.now(), expected)

    job = Job(1)
    files = weft.load(str(tmp_path / "files"))
    job.model.load_state_dict(files["model"])
    job.optimizer.load_state_dict(files["optimizer"])
    assert job.train(4, 4) == losses
    assert_same(job.now(), expected)


def test_what_stays_in_32_bits_is_divided_by_the_loss_scale_too():
    """The gain's gradient is -mean(x): one step of plain descent is 1 + 0.1 mean(x), whatever the scale."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.inner(x).float() * 0 + x.float() * self.gain

    init({"fp16": True})
    model = DistributedModel(Scaled())
    gain = model.get_module().gain
    gain.data = gain.data.float()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=64.0)

    @weft.step
    def step(model, x):
        loss = -model(x).mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(2, 4))
    optimizer.step()
    assert gain.item() == pytest.approx(1.1)


def test_masters_and_the_loss_scale_come_back_without_the_states(tmp_path):
    job = Job()
    job.train(0, 4)
    weft.save_checkpoint(tmp_path, "a", model=job.model, optimizer=job.optimizer)
    saved = job.now()
    job = Job(1)
    job.train(0, 1)
    job.optimizer.param_groups[0]["lr"] = 0.5
    weft.resume_from_checkpoint(tmp_path, load_sharded_optimizer_state=False)
    assert_same(job.now(), saved)
    assert not job.optimizer.state and job.optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_that_is_loaded_between_backward_and_step_changes_no_gradient(tmp_path):
    job = Job()
    job.train(0, 4)
    torch.save([job.model.local_state_dict(), job.optimizer.local_state_dict()], tmp_path / "x")
    assert job.optimizer.loss_scale == 128.0
    losses, expected = job.train(4, 4), job.now()
    job = Job(1)
    model, optimizer = torch.load(tmp_path / "x", weights_only=True)
    job.model.load_state_dict(model)
    job.model.register_post_step_hook(lambda _, other: other.load_state_dict(optimizer))
    assert job.optimizer.loss_scale == 64.0
    assert job.train(4, 4) == losses
    assert_same(job.now(), expected)


FORMS = {
    "names": lambda masters, names: dict(zip(names, masters, strict=True)),
    "prefixed names": lambda masters, names: {f"module.{n}": m for n, m in zip(names, masters, strict=True)},
    "numbers": lambda masters, names: dict(enumerate(masters)),
    "groups": lambda masters, names: [masters[:2], masters[2:]],
    "groups alone": lambda masters, names: [masters[:2], masters[2:]],
}


@pytest.mark.parametrize("form", FORMS)
def test_older_files_with_masters_are_read(tmp_path, form):
    job = Job()
    job.train(0, 4)
    folder = tmp_path / "t_partial"
    folder.mkdir()
    torch.save(job.model.local_state_dict(), folder / "model_0_0.pt")
    optimizer = job.optimizer.local_state_dict()
    masters = [master.clone() for master in optimizer.pop(MASTERS).values()]
    scale = optimizer.pop(SCALE)
    names = ["0.weight", "2.weight", "0.bias", "2.bias"]
    states = FORMS[form](masters, names)
    if form != "groups alone":
        states = {"loss_scaler": dict(scale), "fp32": states}
    torch.save(optimizer, folder / "optimizer_0_0.pt")
    torch.save(states, folder / "fp16_states_0_0.pt")
    losses, expected = job.train(4, 4), job.now()
    job = Job(1)
    weft.resume_from_checkpoint(tmp_path, "t")
    if isinstance(states, dict):
        assert job.train(4, 4) == losses
        assert_same(job.now(), expected)
    else:  # no loss scale was saved
        order = [id(p) for group in job.optimizer.param_groups for p in group["params"]]
        found = sorted((high for _, high in job.optimizer.masters()), key=lambda high: order.index(id(high)))
        assert all(torch.equal(*pair) for pair in zip(found, masters, strict=True))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (
            {"x": 1, "y": torch.ones(2)},
            r"no 32-bit copies that weft can read \(x: int, y: Tensor\).*Remove the file",
        ),
        ([[torch.ones(2)]], r"groups of \[1\] copies, but the model file of its rank has \[2, 2\]"),
    ],
)
def test_masters_that_cannot_be_read_are_refused(tmp_path, states, text):
    job = Job()
    job.train(0, 1)
    folder = tmp_path / "t_partial"
    folder.mkdir()
    torch.save(job.model.local_state_dict(), folder / "model_0_0.pt")
    torch.save(job.optimizer.local_state_dict(), folder / "optimizer_0_0.pt")
    torch.save(states, folder / "fp16_states_0_0.pt")
    before = job.now()
    with pytest.raises(CheckpointError, match=text):
        weft.resume_from_checkpoint(tmp_path, "t")
    assert_same(job.now(), before)


def test_a_state_with_other_groups_is_refused():
    job = Job()
    content = job.optimizer.local_state_dict()
    content["param_groups"] = content["param_groups"][:1]
    with pytest.raises(
        UsageError, match="the state has 1 groups of parameters, the optimizer has 2: build the"
    ):
        job.optimizer.load_state_dict(content)


def test_the_norm_before_clipping_is_there_where_step_clips():
    job = Job()
    job.train(0, 1)
    assert not hasattr(job.optimizer, "_global_grad_norm")
    with pytest.raises(AttributeError, match="it is there with sharded_data_parallel_degree above 1"):
        _ = job.optimizer._global_grad_norm
    kept = job.optimizer.save_optimizer_backcompat(gather_if_shard=False)
    job.optimizer.load_optimizer_backcompat(kept)
    assert kept["_smp_is_partial"] and kept.keys() == job.optimizer.local_state_dict().keys()
