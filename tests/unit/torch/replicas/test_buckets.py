"""A bucket that takes another one's place begins without its errors."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import run_ranks

SCRIPT = """\
import json, sys
import torch
import weft.torch as weft

weft.init({"compression": "int8"})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.zeros(4096)) for _ in range(2))

    def forward(self, x):
        return (self.one * x).sum() + (self.other * x).sum()


net = Net()
model = weft.DistributedModel(net)
step = weft.step(lambda model, x: model.backward(model(x)), non_split_inputs=["x"])
draw = torch.Generator().manual_seed(weft.rank())
net.other.requires_grad_(False)
if "before" in sys.argv:
    for _ in range(3):
        step(model, torch.randn(4096, generator=torch.Generator().manual_seed(7 + weft.rank())))
net.one.requires_grad_(False)
net.other.requires_grad_(True)
model.zero_grad()
step(model, torch.randn(4096, generator=draw))
print("RESULT", json.dumps(net.other.grad[:64].tolist()))
"""


def test_errors_of_a_bucket_are_not_fed_back_into_the_next_one(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = []
    for words in ((), ("before",)):
        done = run_ranks(2, script, words, warm=True).check()
        found.append({line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line})
    assert found[0] == found[1] and len(found[0]) == 1
    assert any(json.loads(found[0].pop()))
