"""Parameters that begin to need gradients unseen are told, not left without averaging."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks

SCRIPT = """\
import sys
import torch
import weft.torch as weft

weft.init({})
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x))


net = Net()
net.last.requires_grad_(False)
model = weft.DistributedModel(net)
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) + weft.rank()
model(x).sum().backward()
optimizer.step()
optimizer.zero_grad()
net.last.requires_grad_(True)
net.first.requires_grad_("frozen" not in sys.argv)
(model(x) if "model" in sys.argv else net.last(net.first(x))).sum().backward()
optimizer.step()
print("RESULT", net.last.weight.grad.tolist())
"""
WORDS = "module.last.weight needs gradients since the model was called the last time"


@pytest.mark.parametrize("words", [(), ("frozen",)])
def test_modules_inside_of_the_model_called_after_requires_grad_changed(words, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_ranks(2, script, words, warm=True)
    assert done.returncode != 0 and WORDS in done.stderr and "RESULT" not in done.stdout


def test_the_model_called_after_requires_grad_changed(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_ranks(2, script, ["model"], warm=True).check()
    assert len({line.partition("RESULT")[2] for line in done.stdout.splitlines() if "RESULT" in line}) == 1
