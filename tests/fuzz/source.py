"""A drawn program as Python source, which is what runs: there is no second meaning of a program beside its text.

The source runs by itself too: `python -m weft run -n 2 program.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.grammar import STATEMENTS, Block, Do, Leaf, Program

HEAD = '''\
"""weft run -n {ranks} THIS_FILE"""
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz import parts

SETTINGS = {settings}
PLACES = {places}
STEPS, ROWS, UNEVEN, EVALUATE, ACCUMULATE, DTYPE, TOLERANCE = {facts}
temperature = nn.Parameter(torch.zeros(()))
'''

TAIL = """
if __name__ == "__main__":
    from tests.fuzz.beside import main

    main(globals())
"""

NEW = (
    "{new} = {t} * 0.5 + {o}.tanh()",
    "{new} = torch.cat([{t}[:, :2], {o}[:, 2:]], 1)",
    "{new} = torch.where({t} > 0, {o}, {t} * 0.1)",
    "{new} = {t} + {o}.mean()",
    "{new} = {t}.detach() * 0.5 + {o}",
    "{new} = torch.stack([{t}, {o}]).sum(0)",
    "left, right = {t}.chunk(2, 1)\n{new} = torch.cat([right, left], 1)",
    "{new} = {t}.clone()",
    "{new} = ({t} @ {o}.t()).softmax(1) @ {o}",
    "{new} = {t}.gather(1, {o}.argsort(1))",
    "{new} = {t} * {o}.argmax(1, keepdim=True)",
    "values, places = {t}.topk(2, 1)\n{new} = {o}.scatter_add(1, places, values)",
    "{new} = torch.stack([row * 0.9 for row in {t}])",
    "{new} = {t}.double().cumsum(1).to({o}.dtype) * 0.3",
    "{new} = {t}.masked_fill({o} < 0, 0.2)",
    "{new} = {t} + {o}.new_full({o}.shape, 0.1)",
    "{new} = {t} + torch.zeros_like({o}).add_({o}.detach())",
    "{new} = {t} * float({o}.detach().abs().max())",
    "{new} = {t} + torch.tensor({o}.detach().tolist(), dtype=x.dtype)",
    "{new} = {t} + torch.from_numpy({o}.detach().numpy().copy())",
    "{new} = {t} * 1.0\n{new}.register_hook(lambda grad: grad * 0.5)",
    "{new} = parts.Twice.apply({t}) - {o}",
    "{new} = F.scaled_dot_product_attention({t}[None], {o}[None], {t}[None])[0]",
    "{new} = F.layer_norm({t}, (parts.WIDTH,)) + {o} * 0.1",
    "{new} = torch.einsum('ij,ij->i', {t}, {o})[:, None] + {t}",
    "{new} = copy.copy({t}) + {o}.data * 0.1",
    "{new} = max([{t}, {o}], key=lambda t: t.detach().sum().item()) * 0.9",
    "{new} = {t} * (0.5 if {t}.requires_grad else 0.7) + (0.1 if {o}.dim() == 2 and len({o}) > 0 else 0.2)",
    "pair = dict(t={t}, o={o})\n{new} = pair.pop('t') * 0.5 + sum(pair.values())",
    "{new} = torch.atleast_2d({t}).expand(-1, parts.WIDTH).contiguous().reshape({o}.shape) * 0.9",
    "with torch.enable_grad():\n    {new} = {t} * 0.5 - {o} * 0.1",
    "{new} = torch.utils.checkpoint.checkpoint(torch.tanh, {t}, use_reentrant=False) + {o}",
    "{new} = {t}.index_select(0, {o}.detach()[:, 0].argsort())",
    "{new} = {t}.abs().pow(2).sum(1, keepdim=True).sqrt() * 0.1 + {o}",
    "{new} = {t} - {t}.logsumexp(0) * 0.1 + {o}.amax()",
    "{new} = {t} * (({t} > 0) & ({o} > 0)).any(1, keepdim=True)",
    "{new} = F.one_hot({t}.argmax(1), parts.WIDTH) * {o} + {t}.detach()",
    "index = torch.arange(len({t}))\n{new} = {t}[index.flip(0)] + {o}[..., [1, 0, 3, 2]]",
    "{new} = F.pad({t}, (1, 1))[:, 1:-1] + {o}.roll(1, 0)",
    "{new} = {t}.mul({o}, ).add({t}, alpha=0.3)",
)
WRITE = (
    "{t} *= 0.8",
    "{new} = {t} * 1.0\n{new}[:, 1] = 0.3",
    "{new} = {t} * 1.0\n{new}.add_({o} * 0.3)",
    "{new} = {t} * 1.0\n{new}[{o}.detach() > 0.2] = 0.1",
    "{t} += {o}.tanh()",
    "{new} = {t} * 1.0\n{new}[0] = {o}[0] * 0.5",
    "{new} = {t} * 1.0\nwith torch.no_grad():\n    {new}.add_(0.01)",
    "{t}[:, 2:].mul_(0.5)",
    "{new} = torch.empty_like({o})\n{new}.copy_({t})",
    "{new} = torch.zeros({o}.shape, dtype=x.dtype)\n{new}[:, :2] = {t}[:, :2]\n{new}[:, 2:] += {o}[:, 2:]",
    "{new} = {t} * 1.0\n{new}.masked_fill_({o} < 0, 0.1).clamp_(-1, 1)",
    "{new} = {t} * 1.0\n{new}.index_add_(0, torch.tensor([0]), {o}[:1])",
    "{new} = {t} * 1.0\nfor row in {new}.unbind(0):\n    row.mul_(0.9)",
    "{new} = {t} * 1.0\nF.relu({new}[:, :1], inplace=True)",
    "{new} = {t}.detach() * 1.0\ntorch.add({o}.detach(), 0.1, out={new})",
    "{new} = {t} * 1.0\n{new}.data.mul_(0.9)",
    "{new} = {t} * 1.0\n{new}.t_().mul_(0.9).t_()",
    "{new} = {t} * 1.0\n{new}[0], {new}[-1] = {o}[-1] * 1.0, {o}[0] * 1.0",
)
VIEW = (
    "{view} = {t}[:, 1:3]",
    "{view} = {t}[-1]",
    "{view} = {t}.t()",
    "{view} = {t}.detach()[:, 0]",
    "{new} = {t} * 1.0\n{view} = {new}.view(-1)[1:3]",
    "{view} = {t}.unsqueeze(1)",
    "{view} = {t}.expand(2, -1, -1)[0]",
    "{view}, _ = {t}.split(2, 1)",
    "{view} = {t}.unbind(1)[0]",
    "{view} = {t}.diagonal()",
    "{view} = {t}[:, None, ::2]",
    "{view} = {t}.view_as({t})",
)
WRITE_VIEW = (
    "{v}.mul_(0.7)",
    "{v} += {o}.mean()",
    "{v}.zero_()",
    "with torch.no_grad():\n    {v}.add_(0.1)",
    "{v}[..., 0] = 0.2",
    "{v}.copy_({v}.detach().flip(0))",
    "{v}.sub_({v}.detach().mean() * 0.1).add_({v} * 0.1)",
)
ENDINGS: dict[str, str] = {
    "backward": "model.backward(loss)",
    "loss_backward": "loss.backward()",
    "retained": "model.backward(loss, retain_graph=True)\nmodel.backward(out.square().mean())",
    "twice": "model.backward(loss)\nloss = F.mse_loss({again}, x)\nmodel.backward(loss)",
    "chunks": "model.backward(loss)\nfor x in y.split(1):\n    model.backward({again}.mean())",
    "several": "model.backward([loss, out], [None, torch.full_like(out, 0.1)])",
    "outside": "loss = loss * temperature.exp()\nmodel.backward(loss)",
    "input_gradient": "model.backward(loss)\nout = out.detach() + x.grad",
    "gradient": "(slope,) = torch.autograd.grad(loss, x, retain_graph=True)\nmodel.backward(loss)\nout = out + slope",
    "penalty": "(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
    "loss = loss + (slope.norm(dim=1) - 1).square().mean()\nmodel.backward(loss)",
    "prompt": "out = {again} + temperature\nloss = loss + out.mean()\nmodel.backward(loss)",
    "kept": "loss = loss + getattr(model.module, 'kept0', out).square().mean()\nmodel.backward(loss)",
    "list_returned": "model.backward(loss)\nout = torch.stack([row.detach().sum() for row in out])",
    "grads_read": "model.backward(loss)\nloss = loss.detach() + (0 if temperature.grad is None else temperature.grad)",
    "detached": "model.backward(F.mse_loss({again}.detach(), x) * temperature.exp() + loss)",
    "aux": "loss = loss + sum(m.aux for m in model.module.modules() if hasattr(m, 'aux'))\nmodel.backward(loss)",
}
SIZED = {"Pair", "Mapped", "Collects", "Stores", "Nothing"}
"""Children that are called in a way of their own."""
COUNTING = {"Norm", "Counted", "Running", "Tally"}
"""Children whose calls change what later ones give."""


@dataclass
class Writer:
    """Writes one program; `habits` are those that its text has, `dense` of each module the children to tie with."""

    program: Program
    habits: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)

    def text(self) -> str:
        program = self.program
        names = [self.block(block, (f"{number}:",)) for number, block in enumerate(program.models)]
        uneven = program.extra % program.microbatches
        settings: dict[str, Any] = {
            "partitions": program.ranks,
            "microbatches": program.microbatches,
            "pipeline": program.pipeline,
            "verify": program.verify,
        }
        if program.by_hand:
            settings |= {"auto_partition": False}
        rough = any("torch.autocast" in text for text in self.classes)
        double = program.double and not rough
        facts = (
            program.steps,
            program.rows * program.microbatches + uneven,
            bool(uneven),
            program.evaluate,
            program.accumulate,
        )
        dtype = "torch.float64" if double else "torch.float32"
        tolerance = 5e-2 if rough else 1e-9 if double else 3e-5
        head = HEAD.format(
            ranks=program.ranks,
            settings=settings,
            places=self.places if program.by_hand else None,
            facts=f"{', '.join(map(repr, facts))}, {dtype}, {tolerance}",
        )
        self.note_settings(bool(uneven))
        build = f"\ndef build():\n    return [{', '.join(f'{name}()' for name in names)}]\n"
        return "\n".join([head, *self.classes, build, self.step(len(names)), TAIL])

    def note_settings(self, uneven: bool) -> None:
        program = self.program
        self.habits |= {
            f"{program.ranks} ranks",
            f"schedule {program.pipeline}",
            "split by hand" if program.by_hand else "split by weft",
        }
        flags = {
            "uneven batches": uneven,
            "evaluation in between": program.evaluate,
            "gradients of several steps": program.accumulate,
            "several models": len(program.models) > 1,
            "double precision": program.double,
        }
        self.habits |= {name for name, flag in flags.items() if flag}

    # --- modules ---------------------------------------------------------------------------------------------

    def block(self, block: Block, path: tuple[str, ...]) -> str:
        """Writes the class of a block after those of its children; its name."""
        prefix = "".join(path)
        inside = []
        marks: list[int] = []
        ties: dict[int, int] = {}
        dense = [
            n
            for n, child in enumerate(block.children)
            if isinstance(child, Leaf)
            and child.kind
            not in ("Same", "Viewed", "Sequence", "Checkpointed", "Plain", "Attention", "Packed", "Embedded")
        ]
        for number, child in enumerate(block.children):
            earlier = [n for n in dense if n < number and n not in ties]
            if isinstance(child, Leaf) and child.tie and number in dense and earlier:
                ties[number] = earlier[0]
            marks.append(marks[ties[number]] if number in ties else child.at)
            name = f"{prefix}m{number}"
            if marks[-1]:
                self.places[name] = (marks[-1] - 1) % self.program.ranks
            if isinstance(child, Block):
                self.habits.add("nested modules")
                inside.append(f"self.m{number} = {self.block(child, (*path, f'm{number}.'))}()")
            else:
                self.habits.add(f"module {child.kind}")
                inside.append(f"self.m{number} = parts.{child.kind}()")
        for number, partner in ties.items():
            self.habits.add("ties")
            inside.append(f"self.m{number}.linear.weight = self.m{partner}.linear.weight")
        body = Body(self, block, len(path) > 1)
        forward = "\n".join(body.lines())
        for number, child in enumerate(block.children):
            if isinstance(child, Leaf) and child.hook:
                line = body.hook(number, child)
                inside += [line] if line else []
        name = f"Net{len(self.classes)}"
        inside = ["super().__init__()", *inside, *sorted(body.made)]
        self.classes.append(
            f"\nclass {name}(nn.Module):\n    def __init__(self):\n{indent(inside, 2)}\n"
            f"\n    def forward(self, x):\n{indent([forward], 2)}\n"
        )
        return name

    # --- the step --------------------------------------------------------------------------------------------

    def step(self, models: int) -> str:
        """The step function: all models one after the other, a loss, and the ending."""
        ending = self.program.ending
        calls = "x"
        for number in range(models):
            calls = f"models[{number}]({calls})"
        lines = ["model = models[-1]"]
        if ending in ("input_gradient", "gradient", "penalty"):
            lines.append("x = x.detach().requires_grad_()")
        lines += [f"out = {calls}", "loss = F.mse_loss(out, y)"]
        again = {
            "twice": calls.replace("(x)", "(y)"),
            "prompt": calls.replace("(x)", "(x + temperature)"),
        }.get(ending, calls)
        lines.append(ENDINGS[ending].format(again=again))
        lines.append("return loss, out")
        self.habits.add(f"ending {ending}")
        return f"\ndef step(models, x, y):\n{indent(lines, 1)}\n"


@dataclass
class Body:
    """Writes one forward. `made`: lines of `__init__` that it needs; `called`: children called so far."""

    writer: Writer
    block: Block
    inner: bool
    made: set[str] = field(default_factory=set)
    called: list[int] = field(default_factory=list)
    whole: list[str] = field(default_factory=lambda: ["x"])
    views: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: bool = False
    store: bool = False
    lists: int = 0
    names: int = 0

    def lines(self) -> Iterator[str]:
        collected = any(isinstance(child, Leaf) and child.hook == "collects" for child in self.block.children)
        if collected:
            self.made.add("self.collected = []")
            yield "self.collected = []"
        body = [line for do in self.block.body for line in self.statement(do)]
        if not self.called:
            body += self.do_call(Do("call"))
        if self.notes:
            yield "notes = []"
        if self.store:
            yield "store = {}"
        yield from body
        if collected:
            yield f"{self.whole[-1]} = {self.whole[-1]} + sum(t.mean() for t in self.collected)"
        older = [f" + 0.3 * {name}.tanh()" for name in self.whole[-3:-1] if name != "x"]
        yield f"return {self.whole[-1]}{''.join(older)}"

    def new(self) -> str:
        """The name of another variable."""
        self.names += 1
        return f"v{self.names - 1}"

    def statement(self, do: Do) -> Sequence[str]:
        """The lines of a statement; none where what it works on is not there."""
        if do.kind == "nothing":
            return []
        own = getattr(self, f"do_{do.kind}", None)
        lines: Sequence[str] = own(do) if own is not None else self.formed(do)
        if lines:
            self.habit(STATEMENTS[do.kind])
        return lines

    def formed(self, do: Do) -> Sequence[str]:
        """Those of one of the fixed forms."""
        forms = {"new": NEW, "write": WRITE, "view": VIEW, "write_view": WRITE_VIEW}[do.kind]
        if do.kind == "write_view" and not self.views:
            return []
        form = forms[do.how % len(forms)]
        names = {
            "t": pick(self.whole, do.a),
            "o": pick(self.whole, do.b),
            "v": pick(self.views or ["x"], do.a),
        }
        new, view = self.new(), f"w{self.names}"
        if "x" in (names["t"] if "{t} *=" in form or "{t} +=" in form or "{t}[:, 2:].mul_" in form else ""):
            return []  # an argument of the step, which the next reference would find changed
        text = form.format(new=new, view=view, **names)
        if "{new}" in form:
            self.whole.append(new)
        if "{view}" in form:
            self.views.append(view)
        return text.split("\n")

    def habit(self, name: str) -> None:
        self.writer.habits.add(name)

    def child(self, number: int, *kinds: str, other: bool = False) -> int | None:
        """A child of such a kind (or of none of them): its number."""
        fitting = [
            n
            for n, child in enumerate(self.block.children)
            if not kinds or ((getattr(child, "kind", "Block") in kinds) != other)
        ]
        return fitting[number % len(fitting)] if fitting else None

    # --- kinds of statements ---------------------------------------------------------------------------------

    def do_call(self, do: Do) -> list[str]:
        # mostly one that was not called yet, so that chains come first
        fresh = [n for n in range(len(self.block.children)) if n not in self.called]
        number = fresh[0] if fresh and do.how < 5 else do.b % len(self.block.children)
        if number in self.called:
            self.habit("revisits")
        if do.a and len(self.whole) > 1:
            self.habit("skips")
        self.called.append(number)
        return self.called_as(number, pick(self.whole, do.a), do.how)

    def called_as(self, number: int, t: str, how: int = 0) -> list[str]:
        """A call of a child, in the way that it needs."""
        kind = getattr(self.block.children[number], "kind", "Block")
        new = self.new()
        self.whole.append(new)
        if kind == "Pair":
            return [f"{new}, level = self.m{number}({t})", f"{new} = {new} * level"]
        if kind == "Mapped":
            mask = ", mask=x.detach() > 0" if how % 2 else ""
            lines = [f"found = self.m{number}({t}, scale=0.5{mask})"]
            return [*lines, f'{new} = found["out"] + found["parts"][0] * found["parts"][1]']
        if kind == "Collects":
            self.notes = True
            return [f"{new} = self.m{number}({t}, notes)", f"{new} = {new} + notes[-1]"]
        if kind == "Stores":
            self.store = True
            return [f"{new} = self.m{number}({t}, store)"]
        if kind == "Nothing":
            return [
                f"{new}, nothing, (first, second) = self.m{number}({t})",
                f"{new} = {new} + first * 0.5 - second",
            ]
        if kind == "Writes":
            t = f"{t} * 1.0" if how % 2 or t == "x" else t
        return [f"{new} = self.m{number}({t})"]

    def do_set(self, do: Do) -> list[str]:
        name = f"kept{do.how % 2}"
        self.kept.append(name)
        return [f"self.{name} = {pick(self.whole, do.a)}"]

    def do_get(self, do: Do) -> list[str]:
        if not self.kept:
            return []
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        return [f"{new} = {t} + self.{pick(self.kept, do.b)}"]

    def do_carry(self, do: Do) -> list[str]:
        if not self.inner and do.how % 4:  # refused where the module is split, as the outermost one is
            return []
        self.made.add("self.mean = torch.zeros(())")
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        return [f"self.mean = 0.9 * self.mean + {t}.detach().mean()", f"{new} = {t} - self.mean"]

    def do_count(self, do: Do) -> list[str]:
        self.made.add("self.count = 0")
        if do.how % 3 == 0:
            return ["self.count += 1"]
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        used = f"{new} = {t} * (1 + 0.1 * self.count)"
        if do.how % 3 == 1:
            return ["self.count += 1", used]
        self.called.append(do.b % len(self.block.children))
        return ["self.count += 1", *self.called_as(self.called[-1], t), used, "self.count -= 1"]

    def do_tally(self, do: Do) -> list[str]:
        number = self.child(do.b, "Tally")
        if number is None:
            return []
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        return [f"{new} = {t} * (1 + 0.1 * self.m{number}.calls)"]

    def do_hand(self, do: Do) -> list[str]:
        number = self.child(do.b, "Reads")
        if number is None:
            return []
        self.called.append(number)
        t = pick(self.whole, do.a)
        return [f"self.m{number}.seen = {t}", *self.called_as(number, pick(self.whole, do.how))]

    def do_aux(self, do: Do) -> list[str]:
        number = self.child(do.b, "Aux")
        if number is None:
            return []
        first = [] if number in self.called else self.called_as(number, pick(self.whole, do.a))
        self.called.append(number)
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        return [*first, f"{new} = {t} + self.m{number}.aux"]

    def do_list(self, do: Do) -> list[str]:
        self.notes = True
        t = pick(self.whole, do.a)
        if self.lists < 1 or do.how % 2:
            self.lists += 1
            return [f"notes.append({t})"]
        new = self.new()
        self.whole.append(new)
        return [f"{new} = {t} + sum(note.mean() for note in notes)"]

    def do_read(self, do: Do) -> list[str]:
        t, o, new = pick(self.whole, do.a), pick(self.whole, do.b), self.new()
        self.whole.append(new)
        value = (f"{t}.detach().sum().item()", f"{t}.mean()", f"{t}.detach()[:, 0].tolist()[0]")[do.how % 3]
        return [f"if {value} > 0:", f"    {new} = {o} * 0.9", "else:", f"    {new} = {t} - {o}.tanh()"]

    def do_exit(self, do: Do) -> list[str]:
        t = pick(self.whole, do.a)
        return [f"if {t}.detach().mean() > 0.2:", f"    return {t}"]

    def do_rows(self, do: Do) -> list[str]:
        number = self.child(do.b, *SIZED, "Norm", "Reads", "Writes", other=True)
        if number is None:
            return []
        self.called.append(number)
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        if do.how % 2:
            return [
                f"rows = ({t}.detach()[:, 1] > 0).nonzero()[:, 0]",
                f"{new} = {t}.index_add(0, rows, self.m{number}({t}[rows]))",
            ]
        return [
            f"rows = {t}.detach()[:, 1] > 0",
            f"{new} = {t} * 1.0",
            f"{new}[rows] = self.m{number}({new}[rows])",
        ]

    def do_draw(self, do: Do) -> list[str]:
        t, o, new = pick(self.whole, do.a), pick(self.whole, do.b), self.new()
        self.whole.append(new)
        noise = ("torch.rand(x.shape)", f"torch.rand_like({t})", "F.dropout(torch.ones_like(x), 0.5)")[
            do.how % 3
        ]
        if do.how % 3 == 1:  # drawn by one rank: used once more by itself
            return [f"noise = {noise}", f"{new} = ({t} + noise) - noise"]
        return [f"noise = {noise}", f"{new} = ({t} + noise) * 0.5 + ({o} - noise) * 0.5"]

    def do_own(self, do: Do) -> list[str]:
        self.made.add("self.scale = nn.Parameter(torch.ones(parts.WIDTH))")
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        return [f"{new} = {t} * self.scale"]

    def do_buffer(self, do: Do) -> list[str]:
        self.made.add('self.register_buffer("level", torch.zeros(()))')
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        # values of activations are refused where the module is split
        value = f"{t}.detach().mean()" if do.how % 4 == 3 else "1.0"
        return [f"self.level.mul_(0.9).add_({value})", f"{new} = {t} - self.level"]

    def do_autocast(self, do: Do) -> list[str]:
        self.called.append(do.b % len(self.block.children))
        lines = self.called_as(self.called[-1], pick(self.whole, do.a), do.how)
        inside = [f"    {line}" for line in lines]
        return [
            'with torch.autocast("cpu", torch.bfloat16):',
            *inside,
            f"{self.whole[-1]} = {self.whole[-1]}.to(x.dtype)",
        ]

    def do_no_grad(self, do: Do) -> list[str]:
        # Open: what another rank's module writes in place without grad mode loses its gradient.
        if getattr(self.block.children[do.b % len(self.block.children)], "kind", "Block") in (
            "Writes",
            "Block",
        ):
            return []
        self.called.append(do.b % len(self.block.children))
        lines = self.called_as(self.called[-1], pick(self.whole, do.a), do.how)
        return ["with torch.no_grad():", *(f"    {line}" for line in lines)]

    def do_checkpoint(self, do: Do) -> list[str]:
        # Not what counts its calls or writes attributes: plain PyTorch does so once more as it goes backward, weft not.
        number = self.child(do.b, *SIZED, *COUNTING, "Aux", "Block", other=True)
        if number is not None and getattr(self.block.children[number], "hook", "") == "collects":
            return []
        if number is None:
            return []
        self.called.append(number)
        t, new = pick(self.whole, do.a), self.new()
        self.whole.append(new)
        what = (f"self.m{number}", f"lambda t: self.m{number}(t) + t.sin()")[do.how % 2]
        # where PyTorch's own refuses in the backward pass what writes into its argument
        reentrant = do.how % 4 == 3 and getattr(self.block.children[number], "kind", "") != "Writes"
        return [f"{new} = checkpoint({what}, {t}, use_reentrant={reentrant})"]

    def do_loop(self, do: Do) -> list[str]:
        number = self.child(do.b, *SIZED, other=True)
        if number is None:
            return []
        self.called.append(number)
        new = self.new()
        t = pick(self.whole, do.a)
        self.whole.append(new)
        return [
            f"{new} = {t} * 1.0",
            f"for turn in range({2 + do.how % 2}):",
            f"    {new} = self.m{number}({new}) * 0.9",
        ]

    def hook(self, number: int, child: Leaf) -> str:
        """The line that puts a hook on a child."""
        if child.kind in SIZED:
            return ""
        self.habit(f"hook {child.hook}")
        target = f"self.m{number}"
        return {
            "result": f"{target}.register_forward_hook(lambda module, given, result: result * 0.9)",
            "input": f"{target}.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))",
            "collects": f"{target}.register_forward_hook(lambda module, given, result: self.collected.append(result))",
            "backward": f"{target}.register_full_backward_hook(lambda module, gave, got: (gave[0] * 0.9,))",
        }[child.hook]


def pick(items: Sequence[str], back: int) -> str:
    """The item that is `back` steps before the last one."""
    return items[-1 - back % len(items)]


def indent(lines: Sequence[str], levels: int) -> str:
    return textwrap.indent("\n".join(lines), "    " * levels)


def written(program: Program) -> tuple[str, frozenset[str]]:
    """The source of a program, and the habits that are in it."""
    writer = Writer(program)
    text = writer.text()
    return text, frozenset(writer.habits)
