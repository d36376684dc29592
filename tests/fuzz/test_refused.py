"""Programs that weft cannot split: each is refused, and the error says what to write instead; and some that it can.

They run as drawn programs do: plain PyTorch runs them, and then two ranks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from tests.fuzz.run import Outcome, Ranks, ranks
from tests.long import one_in

FRAME = '''
import collections, sys, types
import torch
from torch import nn
import torch.nn.functional as F
import weft.torch as weft
from tests.fuzz import parts

SETTINGS = {{"partitions": 2, "microbatches": 2, "auto_partition": False, "verify": "off"}}
PLACES = {{"0:a": 0, "0:b": 1, "0:c": 1}}
STEPS, ROWS, UNEVEN, EVALUATE, ACCUMULATE, DTYPE, TOLERANCE = 2, 4, False, False, False, torch.float32, 3e-05
temperature = nn.Parameter(torch.zeros(()))


def other():
    """Whether this is rank 1 of the job, past its first step's trace."""
    return weft.is_initialized() and weft.rank() == 1 and not weft.is_tracing()


class Part(nn.Linear):
    def __init__(self):
        super().__init__(parts.WIDTH, parts.WIDTH)

{part}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Part(), Part(), parts.Dense()

{forward}

def build():
    return [Net()]


def step(models, x, y):
    model = models[0]
    net = getattr(model, "module", model)
{before}
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss)
{after}
    return loss, out
'''
FORWARD = "def forward(self, x):\n    return self.c(self.b(self.a(x)))"


@pytest.fixture(scope="module")
def job() -> Iterator[Ranks]:
    with ranks() as made:
        yield made


def run(job: Ranks, forward: str = FORWARD, part: str = "", before: str = "", after: str = "") -> Outcome:
    body = {"forward": forward, "part": part, "before": before, "after": after}
    return job.run(FRAME.format(**{name: textwrap.indent(text, "    ") for name, text in body.items()}), 2)


OTHER_CODE = {
    "another operation": "x = self.a(x)\nx = x.view(-1, 4) if other() else x.tanh()\nreturn self.c(x)",
    "another order": "one, two = (self.b, self.c) if other() else (self.c, self.b)\nreturn two(one(self.a(x)))",
    "a module left out": "x = self.a(x)\nx = x if other() else self.b(x)\nreturn self.c(x)",
    "another precision": "x = self.a(x)\nx = (x.double() if other() else x).tanh().float()\nreturn self.c(x)",
    "a number read": "x = self.b(self.a(x))\nif other():\n    x.sum().item()\nreturn self.c(x.tanh())",
    "a module more": "x = self.b(self.a(x))\nreturn self.c(self.a(x) if other() else x)",
    "the other branch": "x = self.b(self.a(x))\nreturn self.b(x) if other() else self.c(x)",
    "no gradients": "with torch.set_grad_enabled(not other()):\n    x = self.b(self.a(x))\nreturn self.c(x)",
}


@pytest.mark.parametrize("kind", one_in(12, OTHER_CODE))
def test_ranks_that_run_different_code_are_told_where(job: Ranks, kind: str):
    outcome = run(job, "def forward(self, x):\n" + textwrap.indent(OTHER_CODE[kind], "    "))
    assert outcome.word == "refused" and outcome.text.startswith("DivergenceError"), outcome
    assert "rank 0" in outcome.text and "rank 1" in outcome.text, outcome


HOLDERS = {
    "a dict of a module": ("sys.modules.setdefault('held', types.ModuleType('held')).__dict__", "['x']"),
    "an attribute of a class": ("type(self)", ".x"),
    "an object of a library": ("sys.modules['string'].Formatter", ".x"),
    "an attribute of a function": ("build.__dict__", "['x']"),
    "a list in a list of a library": ("sys.modules['linecache'].cache.setdefault('x', [[None]])[0]", "[0]"),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_tensor_of_another_microbatch_that_still_runs_is_refused(job: Ranks, kind: str):
    """The tensors go by a way that weft cannot see."""
    holder, at = HOLDERS[kind]
    body = f"""
    def forward(self, x):
        x = self.a(x)
        held = {holder}
        try:
            before = held{at}
        except (AttributeError, KeyError, TypeError):
            before = None
        held{at} = x.detach() * 1
        x = self.b(x)
        return self.c(x if before is None else x + before)
    """
    outcome = run(job, textwrap.dedent(body))
    assert outcome.word == "refused", outcome
    assert "has computed, which still runs: something that both reach" in outcome.text, outcome


FILLED = {
    "list": ("[]", "append(x * 2)", "there[0]"),
    "dict": ("{}", "update(x=x * 2)", "there['x']"),
    "deque": ("collections.deque()", "append(x * 2)", "there[0]"),
    "object": ("types.SimpleNamespace()", "__dict__.update(x=x * 2)", "there.x"),
    "dict of its own class": ("collections.OrderedDict()", "update(x=x * 2)", "there['x']"),
    "list in a tuple": ("([],)", "__getitem__(0).append(x * 2)", "there[0][0]"),
}


@pytest.mark.parametrize("kind", FILLED)
def test_what_a_module_fills_that_the_first_step_did_not_call_reaches_all_ranks(job: Ranks, kind: str):
    new, fill, read = FILLED[kind]
    part = f"""
    def forward(self, x, there=None):
        x = super().forward(x)
        if there is not None:
            there.{fill}
        return x
    """
    body = f"""
    def forward(self, x):
        x = self.a(x)
        if not (weft.is_initialized() and weft.is_tracing()):
            there = {new}
            x = self.b(x, there)
            x = x + {read}
        return self.c(x)
    """
    outcome = run(job, textwrap.dedent(body), textwrap.dedent(part))
    assert outcome.word == "equal", outcome


OPTIMIZER = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
INSIDE = {
    "clipping": ("", "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "the step reads the gradient of a par"),
    "a norm": ("", "sum(one.grad.sum() for one in net.parameters())", "the step reads the gradient of a parameter"),
    "gradients set": ("for one in net.parameters():\n    one.grad = None", "", "the step sets the gradient of a par"),
    "zero_grad": (OPTIMIZER + "optimizer.zero_grad()", "", "the step reads the gradient of a parameter of shape"),
    "an optimizer": ("", OPTIMIZER + "optimizer.step()", "the optimizer's step() was called inside a weft.step"),
    "the model's state": ("", "weft.is_initialized() and model.state_dict()", "state_dict() was called inside a weft"),
    "a collective": (
        "weft.is_initialized() and torch.distributed.all_reduce(torch.ones(2))", "", "torch.distributed.all_reduce() w"
    ),
    "a barrier": ("weft.is_initialized() and weft.barrier()", "", "barrier() was called inside a weft.step function"),
    "other parameters": (
        "torch.func.functional_call(net.b, {'weight': net.b.weight * 1.1}, (x,))", "",
        "the step calls b with other parameters (torch.func.functional_call)",
    ),
    "hooks for the whole": (
        "net.register_full_backward_hook(lambda *of: None)", "", "the model as a whole has backward hooks"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", INSIDE)
def test_what_belongs_between_steps_is_refused_in_one(job: Ranks, kind: str):
    before, after, text = INSIDE[kind]
    outcome = run(job, before=before, after=after)
    assert outcome.word == "refused" and text in outcome.text, outcome
