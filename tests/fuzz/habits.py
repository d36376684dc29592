"""Small programs, each with one habit of real code, as their authors would write it.

They stand in the frame of ``FRAME``: two partitions, two microbatches, four layers, three steps. Each has to give
what one process gives.
"""

from __future__ import annotations

FRAME = """
import collections, sys, types, functools, contextlib, dataclasses, copy, math, weakref
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
import weft.torch as weft
from tests.fuzz import parts
W = parts.WIDTH
SETTINGS = {"partitions": 2, "microbatches": 2, "auto_partition": False, "verify": "losses"}
PLACES = {"0:a": 0, "0:b": 1, "0:c": 1, "0:d": 0}
STEPS, ROWS, UNEVEN, EVALUATE, ACCUMULATE, DTYPE, TOLERANCE = 3, 4, False, False, False, torch.float32, 3e-05
temperature = nn.Parameter(torch.zeros(()))

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(W, W)
    def forward(self, x):
        return self.l(x).tanh()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = Part(), Part(), Part(), Part()
        self.more()
    def more(self): pass
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))

def build():
    return [Net()]

def step(models, x, y):
    model = models[0]
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss, out
"""

HABITS: dict[str, str] = {}

HABITS["ema attr number"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.avg = 0.0
    def forward(self, x):
        h = super().forward(x)
        self.avg = 0.9 * self.avg + 0.1 * h.detach().mean().item()
        return h * (1 + self.avg)
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["ema attr tensor"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.avg = torch.zeros(W)
    def forward(self, x):
        h = super().forward(x)
        self.avg = 0.9 * self.avg + 0.1 * h.detach().mean(0)
        return h * (1 + self.avg)
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["ema attr tensor inplace"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.avg = torch.zeros(W)
    def forward(self, x):
        h = super().forward(x)
        self.avg.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * (1 + self.avg)
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["list attr inplace number"] = """
class Net(Net):
    def more(self): self.hist = [0.0]
    def forward(self, x):
        h = self.b(self.a(x))
        self.hist[0] = 0.9 * self.hist[0] + h.detach().mean().item()
        return self.d(self.c(h + self.hist[0]))
"""
HABITS["unit dict carried"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.hist = {}
    def forward(self, x):
        h = super().forward(x)
        if "h" in self.hist:
            h = h + self.hist["h"]
        self.hist["h"] = h.detach() * 0.1
        return h
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["closure counter"] = """
def make():
    n = 0
    def scale(x):
        nonlocal n
        n += 1
        return x * (1 + 0.1 * n)
    return scale
class Net(Net):
    def more(self): self.scale = make()
    def forward(self, x):
        return self.d(self.scale(self.c(self.b(self.a(x)))))
"""
HABITS["closure counter in unit"] = """
def make():
    n = 0
    def scale(x):
        nonlocal n
        n += 1
        return x * (1 + 0.1 * n)
    return scale
class P2(Part):
    def __init__(self):
        super().__init__()
        self.scale = make()
    def forward(self, x): return self.scale(super().forward(x))
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["lru cache fn"] = """
@functools.lru_cache
def table(n): return torch.arange(n).float() * 0.1
class Net(Net):
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x)) + table(x.shape[1])))
"""
HABITS["property setter state"] = """
class P2(Part):
    @property
    def level(self): return self._level
    @level.setter
    def level(self, v): self._level = v
    def forward(self, x):
        h = super().forward(x)
        self.level = h.mean()
        return h
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
    def forward(self, x):
        out = super().forward(x)
        return out + self.b.level * self.d.level
"""
HABITS["param hook scales"] = """
class Net(Net):
    def more(self):
        for p in self.parameters(): p.register_hook(lambda g: g * 2)
"""
HABITS["param hook clips each"] = """
class Net(Net):
    def more(self):
        for p in self.parameters(): p.register_hook(lambda g: g.clamp(-0.01, 0.01))
"""
HABITS["post accumulate hook"] = """
class Net(Net):
    def more(self):
        self.n = collections.Counter()
        for n, p in self.named_parameters(): p.register_post_accumulate_grad_hook(self.scale)
    def scale(self, p):
        p.grad.mul_(0.5)
"""
HABITS["activation hook"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        if h.requires_grad: h.register_hook(lambda g: g * 3)
        h = self.b(h)
        if h.requires_grad: h.register_hook(lambda g: g + 0.1)
        return self.d(self.c(h))
"""
HABITS["activation hook in unit"] = """
class P2(Part):
    def forward(self, x):
        if x.requires_grad: x.register_hook(lambda g: g * 3)
        h = super().forward(x)
        if h.requires_grad: h.register_hook(lambda g: g + 0.1)
        return h
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["full backward hook"] = """
class Net(Net):
    def more(self):
        for m in (self.b, self.c.l, self.d):
            m.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 1.5 for g in gi))
"""
HABITS["full backward pre hook"] = """
class Net(Net):
    def more(self):
        for m in (self.b, self.c.l, self.d):
            m.register_full_backward_pre_hook(lambda m, go: tuple(None if g is None else g * 1.5 for g in go))
"""
HABITS["retain grad in step"] = """
def step(models, x, y):
    model = models[0]
    h = model.module.a(x)
    h.retain_grad()
    out = model.module.d(model.module.c(model.module.b(h)))
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss, out, h.grad
"""
HABITS["gradient reversal"] = """
class Rev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return -0.5 * g
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(h)) + self.b(Rev.apply(h))
"""
HABITS["straight through"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        q = (h * 4).round() / 4
        h = h + (q - h).detach()
        return self.d(self.c(self.b(h)))
"""
HABITS["data stop gradient"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h)) * h.data)
"""
HABITS["weight norm param"] = """
class Net(Net):
    def more(self):
        torch.nn.utils.parametrizations.weight_norm(self.b.l)
        torch.nn.utils.parametrizations.spectral_norm(self.d.l)
def build():
    torch.manual_seed(1)
    return [Net()]
"""
HABITS["orthogonal param"] = """
class Net(Net):
    def more(self):
        torch.nn.utils.parametrizations.orthogonal(self.c.l)
def build():
    torch.manual_seed(1)
    return [Net()]
"""
HABITS["old spectral norm"] = """
class Net(Net):
    def more(self):
        torch.nn.utils.spectral_norm(self.b.l)
        torch.nn.utils.weight_norm(self.d.l)
def build():
    torch.manual_seed(1)
    return [Net()]
"""
HABITS["no grad section"] = """
class Net(Net):
    def forward(self, x):
        with torch.no_grad():
            h = self.b(self.a(x))
        return self.d(self.c(h))
"""
HABITS["inference mode section"] = """
class Net(Net):
    def forward(self, x):
        with torch.inference_mode():
            h = self.b(self.a(x))
        return self.d(self.c(h.clone()))
"""
HABITS["enable grad inside no grad"] = """
class Net(Net):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                h = self.b(h)
            h2 = self.c(h)
        return self.d(h + h2)
"""
HABITS["grad in forward"] = """
class Net(Net):
    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            e = self.b(z).square().sum()
            g, = torch.autograd.grad(e, z)
        return self.d(self.c(self.a(x) - 0.1 * g))
"""
HABITS["manual grad scale"] = """
def step(models, x, y):
    model = models[0]
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss * 1024)
    return loss, out
"""
HABITS["read param in step"] = """
def step(models, x, y):
    model = models[0]
    out = model(x)
    loss = F.mse_loss(out, y) + 0.01 * sum(p.square().sum() for p in model.module.parameters())
    model.backward(loss)
    return loss, out
"""
HABITS["l1 own parameters"] = """
class Net(Net):
    def forward(self, x):
        out = super().forward(x)
        return out + 0.01 * sum(p.abs().sum() for p in self.parameters())
"""
HABITS["param norms item"] = """
class Net(Net):
    def forward(self, x):
        out = super().forward(x)
        return out / max(1.0, self.b.l.weight.norm().item())
"""
HABITS["mean teacher inside"] = """
class Net(Net):
    def more(self):
        self.teacher = copy.deepcopy(self.b)
        self.teacher.requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.b.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
        h = self.a(x)
        t = self.teacher(h.detach())
        return self.d(self.c(self.b(h))) + t
PLACES = {**PLACES, "0:teacher": 1}
"""
HABITS["loop until"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x); n = 0
        while h.norm() > 0.5 and n < 4:
            h = self.b(h) * 0.7; n += 1
        return self.d(self.c(h)) * n
"""
HABITS["nonzero rows"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        keep = h.mean(1) > -0.1
        out = torch.zeros_like(h)
        out[keep] = self.b(h[keep])
        return self.d(self.c(out))
"""
HABITS["masked scatter moe"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        gate = h.argmax(1)
        out = h * 1.0
        for n, e in enumerate((self.b, self.c, self.d)):
            rows = (gate == n).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, e(h[rows]))
        return out
"""
HABITS["sort topk gather"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        v, i = h.topk(2, dim=1)
        h = torch.zeros_like(h).scatter(1, i, v)
        order = h.sum(1).argsort()
        h = self.b(h[order])[order.argsort()]
        return self.d(self.c(h))
"""
HABITS["numpy roundtrip"] = """
import numpy as np
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        s = torch.from_numpy(np.abs(h.detach().numpy()).max(1, keepdims=True))
        return self.d(self.c(self.b(h) / s))
"""
HABITS["inplace relu chain"] = """
class P2(Part):
    def forward(self, x): return F.relu_(self.l(x)).mul(1.5)
class Net(Net):
    def more(self): self.a, self.b, self.c, self.d = P2(), P2(), P2(), P2()
    def forward(self, x):
        h = self.a(x)
        h = self.b(h * 2)
        h += x
        h = self.c(h * 1.0).add_(h)
        return self.d(h)
"""
HABITS["inplace on input"] = """
class Net(Net):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = 0
        h = self.a(x.clone()) * 1.0
        x += 1
        h[:, 1] = h[:, 1] * 2
        h = self.b(h * 1.0) * 1.0
        h[h < 0] = 0
        return self.d(self.c(h) + x)
"""
HABITS["two inputs outputs"] = """
class P2(Part):
    def forward(self, x, y=None, *, scale=1.0, flags=()):
        h = self.l(x).tanh()
        if y is not None: h = h + y * scale
        return {"h": h, "extra": [h.mean(), (h.max(), "name")], "n": len(flags)}
class Net(Net):
    def more(self): self.a, self.b, self.c, self.d = P2(), P2(), P2(), P2()
    def forward(self, x):
        o = self.a(x)
        p = self.b(o["h"], o["extra"][1][0], scale=0.5, flags=(1, 2))
        q = self.c(p["h"], y=o["h"])
        return self.d(q["h"])["h"] * p["n"] + o["extra"][0]
"""
HABITS["namedtuple out"] = """
Out = collections.namedtuple("Out", "h m")
class P2(Part):
    def forward(self, x):
        h = super().forward(x)
        return Out(h, h.mean())
sys.modules.setdefault("program", types.ModuleType("program")).Out = Out
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        o = self.b(self.a(x)); p = self.c(o.h)
        return self.d(p.h * o.m) + p.m
"""
HABITS["complex numbers"] = """
class Net(Net):
    def forward(self, x):
        h = torch.fft.rfft(self.a(x))
        h = torch.view_as_real(h * (1 + 0.5j)).flatten(1)[:, :4]
        return self.d(self.c(self.b(h)))
"""
HABITS["einsum bmm"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x); k = self.b(h); v = self.c(h)
        att = torch.einsum("ij,kj->ik", h, k).softmax(-1)
        return self.d(att @ v) + torch.bmm(h[:, None], v[:, :, None]).squeeze(1)
"""
HABITS["sdpa"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x); k = self.b(h); v = self.c(h)
        o = F.scaled_dot_product_attention(h[None, None], k[None, None], v[None, None], dropout_p=0.0)
        return self.d(o[0, 0])
"""
HABITS["jvp func grad in unit"] = """
class P2(Part):
    def forward(self, x):
        f = lambda z: self.l(z).tanh().sum()
        return torch.func.grad(f)(x) + self.l(x)
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["checkpoint glue kwargs"] = """
class Net(Net):
    def part(self, x, s=1.0):
        return self.c(self.b(x) * s)
    def forward(self, x):
        h = checkpoint(functools.partial(self.part, s=0.5), self.a(x), use_reentrant=False)
        return self.d(h)
"""
HABITS["checkpoint dropout"] = """
class P2(Part):
    def forward(self, x): return F.dropout(super().forward(x), 0.5, self.training) * 0 + super().forward(x)
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        h = checkpoint(self.b, self.a(x), use_reentrant=True)
        h = checkpoint_seq(nn.Sequential(self.c, self.d), h)
        return h
def checkpoint_seq(seq, h):
    from torch.utils.checkpoint import checkpoint_sequential
    return checkpoint_sequential(seq, 2, h, use_reentrant=False)
"""
HABITS["module called twice diff shapes"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        one = self.b(h[:1]); two = self.b(h[1:])
        return self.d(self.c(torch.cat([two, one])))
"""
HABITS["generator output"] = """
class P2(Part):
    def forward(self, x):
        for i in range(2): yield self.l(x) * (i + 1)
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(sum(self.b(h))))
"""
HABITS["module arg to module"] = """
class P2(Part):
    def forward(self, x, other): return other(self.l(x))
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        return self.d(self.b(self.a(x), self.c))
"""
HABITS["param passed as arg"] = """
class P2(Part):
    def forward(self, x, w): return F.linear(x, w).tanh() + self.l(x)
class Net(Net):
    def more(self): self.b = P2(); self.w = nn.Parameter(torch.randn(W, W))
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x), self.w)) @ self.w)
"""
HABITS["other units param as arg"] = """
class P2(Part):
    def forward(self, x, w): return F.linear(x, w).tanh() + self.l(x)
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x), self.a.l.weight)))
"""
HABITS["func vmap in unit"] = """
class P2(Part):
    def one(self, r): return torch.func.functional_call(self.l, dict(self.l.named_parameters()), (r[None],))[0]
    def forward(self, x): return torch.func.vmap(self.one)(x)
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["func jvp in unit"] = """
class P2(Part):
    def forward(self, x):
        o, t = torch.func.jvp(lambda z: self.l(z).tanh(), (x,), (torch.ones_like(x),))
        return o + t
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["func hessian in unit"] = """
class P2(Part):
    def forward(self, x):
        h = torch.func.vmap(torch.func.hessian(lambda z: self.l(z).tanh().sum()))(x)
        return self.l(x) + h.sum(1)
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["maml in unit"] = """
class P2(Part):
    def forward(self, x):
        ps = dict(self.l.named_parameters())
        g = torch.func.grad(lambda p: torch.func.functional_call(self.l, p, (x,)).square().mean())(ps)
        return torch.func.functional_call(self.l, {k: ps[k] - 0.1 * g[k] for k in ps}, (x,))
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["index put accumulate"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        o = torch.zeros(4, 4)
        o.index_put_((torch.tensor([0, 1]),), self.b(h)[:2], accumulate=True)
        o = o + 0
        o.index_put_((torch.tensor([0, 0]),), h[:2], accumulate=True)
        return self.d(self.c(o))[: len(x)]
"""
HABITS["out arg"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            o = torch.empty_like(h)
            torch.mul(h, 2, out=o)
        return self.d(self.c(self.b(h)) + o)
"""
HABITS["set data activation"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        h.data = h.data * 0.5
        return self.d(self.c(self.b(h)))
"""
HABITS["detach inplace"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        k = self.b(h)
        k.detach_()
        h2 = h.detach()
        h2.requires_grad_()
        return self.d(self.c(k)) + h
"""
HABITS["requires grad toggle inside"] = """
class Net(Net):
    def forward(self, x):
        self.b.requires_grad_(False)
        h = self.b(self.a(x))
        self.b.requires_grad_(True)
        return self.d(self.c(h))
"""
HABITS["train eval inside"] = """
class P2(Part):
    def __init__(self):
        super().__init__(); self.n = nn.BatchNorm1d(W)
    def forward(self, x): return self.n(super().forward(x))
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        self.b.eval()
        h = self.b(self.a(x))
        self.b.train()
        return self.d(self.c(h))
"""
HABITS["buffer queue moco"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, W)); self.register_buffer("ptr", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        h = super().forward(x)
        o = h + self.queue.mean(0)
        p = int(self.ptr); n = len(h)
        self.queue[p:p + n] = h.detach()
        self.ptr[...] = (p + n) % 6
        return o
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["buffer reassigned"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(W))
    def forward(self, x):
        h = super().forward(x)
        self.m = 0.9 * self.m + 0.1 * h.detach().mean(0)
        return h + self.m
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["vq ema codebook"] = """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.randn(8, W)); self.register_buffer("n", torch.ones(8))
        self.l = nn.Linear(W, W)
    def forward(self, x):
        x = self.l(x)
        i = torch.cdist(x.detach(), self.code).argmin(1)
        q = self.code[i]
        if self.training:
            one = F.one_hot(i, 8).float()
            self.n.mul_(0.9).add_(one.sum(0), alpha=0.1)
            self.code.mul_(0.9).add_((one.t() @ x.detach()) / self.n[:, None], alpha=0.1)
        loss = F.mse_loss(x, q)
        return x + (q - x).detach(), loss, i
class Net(Net):
    def more(self): self.b = VQ()
    def forward(self, x):
        q, l, i = self.b(self.a(x))
        self.last = l
        return self.d(self.c(q)) + l
def build():
    torch.manual_seed(0)
    return [Net()]
"""
HABITS["gan two models"] = """
def build(): return [Net(), Net()]
PLACES = {**PLACES, **{k.replace("0:", "1:"): 1 - v for k, v in PLACES.items()}}
def step(models, x, y):
    g, d = models
    gn, dn = getattr(g, "module", g), getattr(d, "module", d)
    fake = g(x)
    dn.requires_grad_(False)
    lg = d(fake).square().mean()
    g.backward(lg)
    dn.requires_grad_(True)
    ld = (d(fake.detach()) - 1).square().mean() + d(y).square().mean()
    d.backward(ld)
    return lg, ld
"""
HABITS["gan toggle attr"] = """
def build(): return [Net(), Net()]
PLACES = {**PLACES, **{k.replace("0:", "1:"): v for k, v in PLACES.items()}}
def step(models, x, y):
    g, d = models
    gn, dn = getattr(g, "module", g), getattr(d, "module", d)
    for p in dn.parameters(): p.requires_grad = False
    lg = d(g(x)).square().mean()
    g.backward(lg)
    for p in dn.parameters(): p.requires_grad = True
    for p in gn.parameters(): p.requires_grad = False
    ld = (d(g(x).detach()) - 1).square().mean() + d(y).square().mean()
    d.backward(ld)
    for p in gn.parameters(): p.requires_grad = True
    return lg, ld
"""
HABITS["left frozen after"] = """
class Net(Net):
    def more(self): self.n = 0
    def forward(self, x):
        h = self.b(self.a(x))
        self.b.requires_grad_(False)
        return self.d(self.c(h))
"""
HABITS["toggle root weight in glue"] = """
class Net(Net):
    def more(self): self.w = nn.Parameter(torch.eye(W))
    def forward(self, x):
        self.w.requires_grad_(False)
        h = self.a(x) @ self.w
        h = self.b(h)
        self.w.requires_grad_(True)
        h = self.c(h @ self.w)
        return self.d(h)
"""
HABITS["frozen first then twice"] = """
class Net(Net):
    def forward(self, x):
        self.b.requires_grad_(False)
        f = self.b(x)
        self.b.requires_grad_(True)
        t = self.b(x)
        return self.d(self.c(self.a(f + t))) + f * t
"""
HABITS["forward directly"] = """
class Net(Net):
    def forward(self, x):
        h = self.a.forward(x)
        h = self.b.forward(h)
        return self.d(self.c.forward(h))
"""
HABITS["module call class"] = """
class Net(Net):
    def forward(self, x):
        h = nn.Module.__call__(self.b, self.a(x))
        return self.d(self.c._call_impl(h))
"""
HABITS["super forward chain"] = """
class P2(Part):
    def forward(self, x): return super().forward(x) + 1
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        return self.d(self.c(Part.forward(self.b, self.a(x))))
"""
HABITS["unregistered list"] = """
class Net(Net):
    def more(self):
        self.__dict__["alias"] = [self.b, self.c]
    def forward(self, x):
        h = self.a(x)
        for m in self.alias: h = m(h)
        return self.d(h)
"""
HABITS["callable wrapping module"] = """
class Wrap:
    def __init__(self, m): self.m = m
    def __call__(self, x): return self.m(x) * 2
class Net(Net):
    def more(self): self.w = Wrap(self.b)
    def forward(self, x): return self.d(self.c(self.w(self.a(x))))
"""
HABITS["bound forward saved"] = """
class Net(Net):
    def more(self): self.f = self.b.forward
    def forward(self, x): return self.d(self.c(self.f(self.a(x))))
"""
HABITS["patched forward instance"] = """
class Net(Net):
    def more(self):
        old = self.b.forward
        self.b.forward = lambda x: old(x) * 2
    def forward(self, x): return self.d(self.c(self.b(self.a(x))))
"""
HABITS["getattr override"] = """
class Net(Net):
    def __getattr__(self, name):
        if name == "bee": return super().__getattr__("b")
        return super().__getattr__(name)
    def forward(self, x): return self.d(self.c(self.bee(self.a(x))))
"""
HABITS["weight clamp in forward"] = """
class P2(Part):
    def forward(self, x):
        self.l.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)
class Net(Net):
    def more(self): self.b = P2()
"""
HABITS["weight clamp in glue"] = """
class Net(Net):
    def forward(self, x):
        with torch.no_grad():
            for p in self.b.parameters(): p.clamp_(-0.2, 0.2)
        return super().forward(x)
"""
HABITS["embedding max norm"] = """
class E(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(8, W, max_norm=0.5); self.l = nn.Linear(W, W)
    def forward(self, i): return self.l(self.e(i))
class Net(Net):
    def more(self): self.b = E()
    def forward(self, x):
        i = (x.abs() * 2).long().clamp(max=7)[:, 0]
        return self.d(self.c(self.a(x) + self.b(i)))
def build():
    torch.manual_seed(0)
    return [Net()]
"""
HABITS["embedding sparse"] = """
class E(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(8, W, sparse=False, scale_grad_by_freq=True, padding_idx=0); self.l = nn.Linear(W, W)
    def forward(self, i): return self.l(self.e(i))
class Net(Net):
    def more(self): self.b = E(); self.bag = nn.EmbeddingBag(8, W, mode="mean")
    def forward(self, x):
        i = (x.abs() * 2).long().clamp(max=7)
        return self.d(self.c(self.a(x) + self.b(i[:, 0]) + self.bag(i)))
def build():
    torch.manual_seed(0)
    return [Net()]
PLACES = {**PLACES, "0:bag": 1}
"""
HABITS["lstm state"] = """
class Net(Net):
    def more(self): self.b = nn.LSTM(W, W, 2, batch_first=True, bidirectional=False); self.g = nn.GRUCell(W, W)
    def forward(self, x):
        o, (h, c) = self.b(self.a(x)[:, None, :].expand(-1, 3, -1).contiguous())
        z = self.g(h[-1], c[-1])
        return self.d(self.c(z + o[:, -1]))
def build():
    torch.manual_seed(0)
    return [Net()]
PLACES = {**PLACES, "0:g": 0}
"""
HABITS["mha and encoder"] = """
class Net(Net):
    def more(self):
        self.b = nn.MultiheadAttention(W, 2, batch_first=True)
        self.e = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True)
    def forward(self, x):
        h = self.a(x)[None]
        o, w = self.b(h, h, h, need_weights=True)
        o = self.e(o)
        return self.d(self.c(o[0])) + w.sum()
def build():
    torch.manual_seed(0)
    return [Net()]
PLACES = {**PLACES, "0:e": 0}
EVALUATE = True
def step(models, x, y):
    model = models[0]
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss, out
"""
HABITS["parameter list dict"] = """
class Net(Net):
    def more(self):
        self.ps = nn.ParameterList([torch.randn(W) for _ in range(3)])
        self.pd = nn.ParameterDict({"s": torch.randn(W, W)})
    def forward(self, x):
        h = self.a(x)
        for p in self.ps: h = h * p
        h = self.b(h)
        return self.d(self.c(h @ self.pd["s"]))
def build():
    torch.manual_seed(0)
    return [Net()]
"""
HABITS["buffer constant mask"] = """
class Net(Net):
    def more(self):
        self.register_buffer("mask", torch.tril(torch.ones(W, W)), persistent=False)
        self.register_buffer("none", None)
    def forward(self, x):
        h = self.a(x) @ self.mask
        return self.d(self.c(self.b(h)) @ self.mask.t())
"""
HABITS["own generator"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.g = torch.Generator().manual_seed(3)
    def forward(self, x): return super().forward(x) * torch.rand(x.shape, generator=self.g)
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["own generator in glue"] = """
class Net(Net):
    def more(self): self.g = torch.Generator().manual_seed(3)
    def forward(self, x):
        h = self.b(self.a(x))
        return self.d(self.c(h * torch.rand(h.shape, generator=self.g)))
"""
HABITS["random random own"] = """
import random
class P2(Part):
    def __init__(self):
        super().__init__()
        self.r = random.Random(3)
    def forward(self, x): return super().forward(x) * self.r.random()
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
"""
HABITS["seeded inside"] = """
class P2(Part):
    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return super().forward(x) * torch.rand(x.shape)
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
    def forward(self, x):
        torch.manual_seed(5)
        return super().forward(x) + torch.rand(W)
"""
HABITS["default dtype inside"] = """
class P2(Part):
    def forward(self, x):
        old = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        z = torch.ones(W)
        torch.set_default_dtype(old)
        return super().forward(x) * z.float()
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        h = self.b(self.a(x))
        s = torch.tensor(0.1)
        torch.set_default_dtype(torch.float32)
        return self.d(self.c(h * s.float()))
"""
HABITS["contextvar switch"] = """
import contextvars
V = contextvars.ContextVar("v", default=1.0)
class P2(Part):
    def forward(self, x): return super().forward(x) * V.get()
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
    def forward(self, x):
        h = self.a(x)
        t = V.set(2.0)
        h = self.b(h)
        V.reset(t)
        return self.d(self.c(h))
"""
HABITS["lora merge unmerge"] = """
class P2(Part):
    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(torch.randn(W, 1) * 0.1); self.B = nn.Parameter(torch.randn(1, W) * 0.1)
        self.on = True
    def forward(self, x):
        h = super().forward(x)
        return h + x @ self.A @ self.B if self.on else h
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
    def forward(self, x):
        self.b.on = self.d.on = False
        with torch.no_grad(): ref = super().forward(x)
        self.b.on = self.d.on = True
        return super().forward(x) - 0.1 * ref
def build():
    torch.manual_seed(0)
    return [Net()]
"""
HABITS["foreach ema in glue"] = """
class Net(Net):
    def more(self):
        self.teacher = copy.deepcopy(self.b)
        self.teacher.requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            torch._foreach_mul_(list(self.teacher.parameters()), 0.9)
            torch._foreach_add_(list(self.teacher.parameters()), list(self.b.parameters()), alpha=0.1)
        h = self.a(x)
        t = self.teacher(h.detach())
        return self.d(self.c(self.b(h))) + t
PLACES = {**PLACES, "0:teacher": 1}
"""
HABITS["ema two ranks"] = """
class Net(Net):
    def more(self):
        self.ta, self.tb = copy.deepcopy(self.a), copy.deepcopy(self.b)
        self.ta.requires_grad_(False); self.tb.requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            for t, o in ((self.ta, self.a), (self.tb, self.b)):
                for p, q in zip(t.parameters(), o.parameters()): p.data.lerp_(q.data, 0.1)
            t = self.tb(self.ta(x))
        return self.d(self.c(self.b(self.a(x)))) + t
PLACES = {**PLACES, "0:ta": 0, "0:tb": 1}
"""
HABITS["ema two ranks copy"] = """
class Net(Net):
    def more(self):
        self.ta, self.tb = copy.deepcopy(self.a), copy.deepcopy(self.b)
        self.ta.requires_grad_(False); self.tb.requires_grad_(False)
    def forward(self, x):
        out = self.d(self.c(self.b(self.a(x))))
        with torch.no_grad():
            t = self.tb(self.ta(x))
            for t_, o in ((self.ta, self.a), (self.tb, self.b)):
                for p, q in zip(t_.parameters(), o.parameters()): p.copy_(p * 0.9 + q * 0.1)
        return out + t
PLACES = {**PLACES, "0:ta": 0, "0:tb": 1}
"""
HABITS["ema cross ranks"] = """
class Net(Net):
    def more(self):
        self.tb = copy.deepcopy(self.b)
        self.tb.requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.tb.parameters(), self.b.parameters()): p.mul_(0.9).add_(q, alpha=0.1)
            t = self.tb(self.a(x))
        return self.d(self.c(self.b(self.a(x)))) + t
PLACES = {**PLACES, "0:tb": 0}
"""
HABITS["glue own param written"] = """
class Net(Net):
    def more(self): self.center = nn.Parameter(torch.zeros(W), requires_grad=False)
    def forward(self, x):
        h = self.b(self.a(x))
        o = h - self.center
        with torch.no_grad(): self.center.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.d(self.c(o))
"""
HABITS["step writes teacher"] = """
class Net(Net):
    def more(self):
        self.teacher = copy.deepcopy(self.b)
        self.teacher.requires_grad_(False)
    def forward(self, x):
        h = self.a(x)
        t = self.teacher(h.detach())
        return self.d(self.c(self.b(h))) + t
PLACES = {**PLACES, "0:teacher": 1}
def step(models, x, y):
    model = models[0]
    net = getattr(model, "module", model)
    with torch.no_grad():
        for p, q in zip(net.teacher.parameters(), net.b.parameters()): p.mul_(0.9).add_(q, alpha=0.1)
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss, out
"""
HABITS["glue writes unit buffer"] = """
class P2(Part):
    def __init__(self):
        super().__init__(); self.register_buffer("s", torch.ones(W))
    def forward(self, x): return super().forward(x) * self.s
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
    def forward(self, x):
        self.b.s.mul_(1.1)
        h = self.b(self.a(x))
        self.d.s.add_(0.1)
        return self.d(self.c(h))
"""
HABITS["step writes unit buffer"] = """
class P2(Part):
    def __init__(self):
        super().__init__(); self.register_buffer("s", torch.ones(W))
    def forward(self, x): return super().forward(x) * self.s
class Net(Net):
    def more(self): self.b, self.d = P2(), P2()
def step(models, x, y):
    model = models[0]
    net = getattr(model, "module", model)
    net.b.s.mul_(1.1); net.d.s.fill_(float(x.abs().mean()))
    out = model(x)
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss, out
"""
HABITS["foreach activations"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x); k = self.b(h)
        m = torch._foreach_mul([h, k, x], 2.0)
        n = torch._foreach_add(m, [x, h, k])
        return self.d(self.c(n[0] + n[1])) + n[2]
"""
HABITS["batchnorm stats read"] = """
class P2(Part):
    def __init__(self):
        super().__init__(); self.n = nn.BatchNorm1d(W)
    def forward(self, x): return self.n(super().forward(x))
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.b(self.a(x))
        h = self.a(h)
        return self.d(self.c(h)) + self.b.n.running_mean
"""
HABITS["param of unit in list arg"] = """
class P2(Part):
    def forward(self, x, ws): return sum(F.linear(x, w) for w in ws)
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.b(self.a(x), [self.c.l.weight, self.a.l.weight, self.d.l.weight])
        return self.d(self.c(h))
"""
HABITS["closure over param"] = """
class Net(Net):
    def more(self):
        w = self.b.l.weight
        self.fn = lambda x: F.linear(x, w)
    def forward(self, x):
        return self.d(self.fn(self.c(self.b(self.a(x)))))
"""
HABITS["closure over activation"] = """
class Net(Net):
    def forward(self, x):
        h = self.a(x)
        def f(z): return self.b(z) * h
        z = f(h)
        g = functools.partial(torch.add, h)
        return self.d(self.c(g(z)))
"""
HABITS["closure activation passed to unit"] = """
class P2(Part):
    def forward(self, x, f): return f(super().forward(x))
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h, lambda z: z * h)))
"""
HABITS["partial with tensor to unit"] = """
class P2(Part):
    def forward(self, x, f): return f(super().forward(x))
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h, functools.partial(torch.mul, h))))
"""
HABITS["object with tensors to unit"] = """
class Ctx:
    def __init__(self, **k): self.__dict__.update(k)
class P2(Part):
    def forward(self, x, ctx): 
        h = super().forward(x) * ctx.scale
        ctx.out = h
        return h
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        h = self.a(x)
        ctx = Ctx(scale=h.mean())
        h = self.b(h, ctx)
        ctx.scale = ctx.scale + ctx.out.mean()
        h = self.c(h, ctx)
        return self.d(h) + ctx.out
"""
HABITS["slots object to unit"] = """
class Ctx:
    __slots__ = ("scale", "out")
    def __init__(self, s): self.scale = s; self.out = None
class P2(Part):
    def forward(self, x, ctx): 
        h = super().forward(x) * ctx.scale
        ctx.out = h
        return h
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        h = self.a(x)
        ctx = Ctx(h.mean())
        h = self.b(h, ctx)
        ctx.scale = ctx.scale + ctx.out.mean()
        h = self.c(h, ctx)
        return self.d(h) + ctx.out
"""
HABITS["deque args"] = """
class P2(Part):
    def forward(self, q): 
        h = super().forward(q.popleft())
        q.append(h)
        return h
class Net(Net):
    def more(self): self.b, self.c = P2(), P2()
    def forward(self, x):
        q = collections.deque([self.a(x), x])
        self.b(q); self.c(q)
        return self.d(q[0] + q[1])
"""
HABITS["generator arg"] = """
class P2(Part):
    def forward(self, g): return sum(super(P2, self).forward(z) for z in g)
class Net(Net):
    def more(self): self.b = P2()
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h * i for i in range(1, 3))))
"""
HABITS["foreach in place on activations"] = """
class Net(Net):
    def forward(self, x):
        h, k = self.a(x) * 1.0, self.b(x) * 1.0
        torch._foreach_mul_([h, k], 0.5)
        torch._foreach_add_((h, k), (x, x))
        return self.d(self.c(h)) + k
"""
HABITS["foreach in place on one"] = """
class Net(Net):
    def forward(self, x):
        k = self.b(self.a(x)) * 1.0
        torch._foreach_mul_((k,), 0.5)
        return self.d(self.c(k))
"""
