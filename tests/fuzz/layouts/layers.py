"""Writes layers as Python: attention, two linears, experts, something along the sequence.

A layer gets `x` (samples, positions, WIDTH) and `words` (samples, positions), and gives what is added to `x`.
"""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEADS, INNER, WORDS = 24, 6, 36, 17
SIZE = WIDTH // HEADS


class Picks:
    """A layer's numbers, one after the other."""

    def __init__(self, picks: Sequence[int]) -> None:
        self._picks = iter(picks)

    def of(self, *choices: str) -> str:
        return choices[next(self._picks, 0) % len(choices)]

    def number(self, most: int) -> int:
        return next(self._picks, 0) % most


def _class(name: str, made: Sequence[str], lines: Sequence[str], methods: str = "") -> str:
    parts = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    parts += [f"        {line}" for line in made]
    parts += ["", "    def forward(self, x, words):"]
    parts += [f"        {line}" for line in lines]
    return "\n".join(parts) + "\n\n\n" + methods


def attention(name: str, picks: Picks) -> str:
    """Attention: how q, k and v are made, how positions come in, how scores are made, what follows."""
    how = picks.of("separate", "fused", "by heads", "grouped", "stacked", "one head")
    core = picks.of("sdpa", "softmax", "einsum", "baddbmm", "additive")
    mask = picks.of("causal", "none", "padding", "window", "both")
    places = picks.of("none", "rotary", "relative", "alibi", "buffer")
    after = picks.of("none", "gate", "norm of heads", "talking", "scale of heads", "norm before out")
    joined = picks.of("transpose", "permute", "flatten", "reshape")
    bias = picks.of("True", "False")
    normed = picks.of("none", "q and k", "sum")
    groups = {"grouped": 3, "one head": 1}.get(how, HEADS)
    made = [f"self.out = nn.Linear({WIDTH}, {WIDTH}, bias={bias})"]
    lines = ["samples, length, _ = x.shape"]
    if how in ("separate", "grouped", "one head"):
        made += [
            f"self.q = nn.Linear({WIDTH}, {WIDTH}, bias={bias})",
            f"self.k = nn.Linear({WIDTH}, {groups * SIZE}, bias={bias})",
            f"self.v = nn.Linear({WIDTH}, {groups * SIZE}, bias={bias})",
        ]
        lines += [
            f"q = self.q(x).view(samples, length, {HEADS}, {SIZE}).transpose(1, 2)",
            f"k = self.k(x).view(samples, length, -1, {SIZE}).transpose(1, 2)",
            f"v = self.v(x).view(samples, length, -1, {SIZE}).transpose(1, 2)",
        ]
        if groups < HEADS:
            lines += [f"k, v = (each.repeat_interleave({HEADS // groups}, 1) for each in (k, v))"]
    else:
        made += [f"self.qkv = nn.Linear({WIDTH}, {3 * WIDTH}, bias={bias})"]
        lines += {
            "fused": [
                f"q, k, v = (each.view(samples, length, {HEADS}, {SIZE}).transpose(1, 2)",
                f"           for each in self.qkv(x).split({WIDTH}, -1))",
            ],
            "by heads": [
                f"qkv = self.qkv(x).view(samples, length, {HEADS}, {3 * SIZE}).transpose(1, 2)",
                "q, k, v = qkv.chunk(3, -1)",
            ],
            "stacked": [
                f"q, k, v = self.qkv(x).reshape(samples, length, 3, {HEADS}, {SIZE}).permute(2, 0, 3, 1, 4).unbind(0)"
            ],
        }[how]
    if normed == "q and k":
        made += [f"self.qn, self.kn = RMS({SIZE}), nn.LayerNorm({SIZE})"]
        lines += ["q, k = self.qn(q), self.kn(k)"]
    elif normed == "sum":
        lines += ["q = q / (1 + q.abs().sum(-1, keepdim=True))"]
    if places == "rotary":
        lines += [
            "places = torch.arange(length, device=x.device)",
            "q, k = rotated(q, places), rotated(k, places)",
        ]
    elif places == "buffer":
        made += [f"self.register_buffer('table', torch.linspace(0, 1, 16 * {SIZE}).view(16, {SIZE}))"]
        lines += ["q, k = q + self.table[:length], k * (1 + self.table[None, None, :length])"]
    lines += ["bias = None"]
    if mask in ("causal", "both") and not (
        core == "sdpa" and places not in ("relative", "alibi") and mask == "causal"
    ):
        lines += [
            "hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)",
            "bias = torch.zeros(length, length, dtype=x.dtype, device=x.device).masked_fill(hidden, -1e4)",
        ]
    if mask in ("padding", "both"):
        lines += [
            "padding = (words == 0)[:, None, None, :].to(x.dtype) * -1e4",
            "bias = padding if bias is None else bias + padding",
        ]
    if mask == "window":
        lines += [
            "at = torch.arange(length, device=x.device)",
            "far = (at[:, None] - at[None]).abs() > 2",
            "bias = torch.where(far, -1e4, 0.0).to(x.dtype)[None, None]",
        ]
    if places == "relative":
        made += [f"self.near = nn.Embedding(7, {HEADS})"]
        lines += [
            "at = torch.arange(length, device=x.device)",
            "relative = self.near((at[None] - at[:, None]).clamp(-3, 3) + 3).permute(2, 0, 1)[None]",
            "bias = relative if bias is None else bias + relative",
        ]
    elif places == "alibi":
        lines += [
            f"slopes = (0.5 ** torch.arange(1, {HEADS} + 1, device=x.device)).to(x.dtype).view({HEADS}, 1, 1)",
            "distance = torch.arange(length, device=x.device).to(x.dtype)",
            "alibi = (slopes * distance)[None]",
            "bias = alibi if bias is None else bias + alibi",
        ]
    scale = f"{SIZE}**-0.5"
    if core == "sdpa":
        whole = mask == "causal" and places not in ("relative", "alibi")
        lines += [
            "mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
            if whole
            else "mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)"
        ]
    elif core == "baddbmm":
        lines += [
            f"flat = [each.reshape(samples * {HEADS}, length, {SIZE}) for each in (q, k, v)]",
            f"start = torch.zeros((), dtype=x.dtype, device=x.device).expand(samples * {HEADS}, length, length)",
            f"scores = torch.baddbmm(start, flat[0], flat[1].transpose(1, 2), beta=0.0, alpha={scale})",
            f"scores = scores.view(samples, {HEADS}, length, length)",
            "scores = scores if bias is None else scores + bias",
            f"weights = scores.softmax(-1).view(samples * {HEADS}, length, length)",
            f"mixed = torch.bmm(weights, flat[2]).view(samples, {HEADS}, length, {SIZE})",
        ]
    else:
        lines += [
            f"scores = torch.einsum('bhid,bhjd->bhij', q, k) * {scale}"
            if core == "einsum"
            else f"scores = q @ k.transpose(-1, -2) / math.sqrt({SIZE})"
        ]
        lines += ["scores = scores if bias is None else scores + bias"]
        if core == "additive":
            lines += ["scores = scores - scores.amax(-1, keepdim=True).detach()", "weights = scores.exp()"]
            lines += ["weights = weights / weights.sum(-1, keepdim=True)"]
        else:
            lines += ["weights = F.softmax(scores, dim=-1)"]
        if after == "talking":
            made += [f"self.talk = nn.Linear({HEADS}, {HEADS}, bias=False)"]
            lines += ["weights = self.talk(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"]
        lines += [
            "mixed = torch.einsum('bhij,bhjd->bhid', weights, v)"
            if core == "einsum"
            else "mixed = weights @ v"
        ]
    if after == "scale of heads":
        made += [f"self.heads = nn.Parameter(torch.ones({HEADS}, 1, 1))"]
        lines += ["mixed = mixed * self.heads"]
    elif after == "norm of heads":
        made += [f"self.each = nn.LayerNorm({SIZE})"]
        lines += ["mixed = self.each(mixed)"]
    lines += {
        "transpose": [f"mixed = mixed.transpose(1, 2).contiguous().view(samples, length, {WIDTH})"],
        "permute": [f"mixed = mixed.permute(0, 2, 1, 3).reshape(samples, length, {WIDTH})"],
        "flatten": ["mixed = mixed.transpose(1, 2).flatten(2)"],
        "reshape": [f"mixed = mixed.transpose(1, 2).reshape(*x.shape[:2], {WIDTH})"],
    }[joined]
    if after == "gate":
        made += [f"self.gate = nn.Linear({WIDTH}, {WIDTH})"]
        lines += ["mixed = mixed * torch.sigmoid(self.gate(x))"]
    elif after == "norm before out":
        made += [f"self.before = nn.LayerNorm({WIDTH})"]
        lines += ["mixed = self.before(mixed)"]
    return _class(name, made, [*lines, "return self.out(mixed)"])


def mlp(name: str, picks: Picks) -> str:
    """Two linears and what lies between them."""
    how = picks.of("plain", "gated", "fused gate", "conv1d", "three", "shared input", "parameters")
    act = picks.of(
        "F.gelu(h)", "torch.relu(h)", "torch.tanh(h)", "F.silu(h)", "h * torch.sigmoid(1.702 * h)", "h ** 2"
    )
    middle = picks.of(
        "none", "norm", "scale", "softmax", "cumsum", "flip", "dropout", "residual", "sum", "halves", "pairs",
        "attribute",
    )  # fmt: skip
    flat = picks.of("none", "samples and positions", "positions first")
    bias = picks.of("True", "False")
    made, lines, inner = [], [], INNER
    if flat == "samples and positions":
        lines += ["shape = x.shape", f"x = x.reshape(-1, {WIDTH})"]
    elif flat == "positions first":
        lines += ["x = x.transpose(0, 1)"]
    out = "self.outer(h)"
    if how == "gated":
        made += [
            f"self.gate = nn.Linear({WIDTH}, {inner}, bias={bias})",
            f"self.up = nn.Linear({WIDTH}, {inner})",
        ]
        lines += ["h = self.gate(x)", f"h = ({act}) * self.up(x)"]
    elif how == "fused gate":
        made += [f"self.both = nn.Linear({WIDTH}, {2 * inner}, bias={bias})"]
        lines += ["h, up = self.both(x).chunk(2, -1)", f"h = ({act}) * up"]
    elif how == "three":
        made += [
            f"self.inner = nn.Linear({WIDTH}, {inner}, bias={bias})",
            f"self.between = nn.Linear({inner}, {inner})",
        ]
        lines += ["h = self.inner(x)", f"h = {act}", "h = torch.relu(self.between(h))"]
    elif how == "shared input":
        made += [
            f"self.inner = nn.Linear({WIDTH}, {inner}, bias={bias})",
            f"self.side = nn.Linear({inner}, {WIDTH})",
        ]
        lines += ["h = self.inner(x)", f"h = {act}"]
        out = "self.outer(h) + self.side(h)"
    elif how == "parameters":
        made += [f"self.w = nn.Parameter(torch.randn({WIDTH}, {inner}) * 0.2)"]
        lines += ["h = x @ self.w", f"h = {act}"]
    else:
        made += [f"self.inner = nn.Linear({WIDTH}, {inner}, bias={bias})"]
        lines += ["h = self.inner(x)", f"h = {act}"]
    made += [f"self.outer = nn.Linear({inner}, {WIDTH}, bias={bias})"]
    if how == "conv1d":  # a linear whose weight has the inputs first
        made = [f"self.inner, self.outer = Conv1D({inner}, {WIDTH}), Conv1D({WIDTH}, {inner})"]
    if middle == "norm":
        made += [f"self.middle = nn.LayerNorm({inner})"]
        lines += ["h = self.middle(h)"]
    elif middle == "scale":
        made += [f"self.scale = nn.Parameter(torch.linspace(0.5, 1.5, {inner}))"]
        lines += ["h = h * self.scale"]
    elif middle == "residual":
        made += [f"self.skip = nn.Linear({WIDTH}, {inner}, bias=False)"]
        lines += ["h = h + self.skip(x)"]
    elif middle == "attribute":
        lines += ["self.kept = h.detach().mean()"]
    elif middle != "none":
        lines += {
            "softmax": ["h = h * h.softmax(-1)"],
            "cumsum": ["h = h.cumsum(-1) / 8"],
            "flip": ["h = h.flip(-1)"],
            "dropout": ["h = F.dropout(h, 0.0, self.training)"],
            "sum": ["h = h + h.mean(-1, keepdim=True)"],
            "halves": [f"h = torch.cat([h[..., {inner // 2}:], h[..., :{inner // 2}]], -1)"],
            "pairs": [f"h = h.unflatten(-1, ({inner // 2}, 2)).flip(-1).flatten(-2)"],
        }[middle]
    lines += [f"h = {out}"]
    if flat == "samples and positions":
        lines += ["h = h.view(shape)"]
    elif flat == "positions first":
        lines += ["h = h.transpose(0, 1)"]
    return _class(name, made, [*lines, "return h"])


def cross(name: str, picks: Picks) -> str:
    """Attention to something else than the layer's input."""
    memory = picks.of("every second", "other words", "learned", "pooled", "first half", "same")
    form = picks.of("two linears", "one linear", "module")
    how = picks.of("sdpa", "softmax")
    made, lines = [f"self.q, self.out = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})"], []
    if memory == "other words":
        made += [f"self.table = nn.Embedding({WORDS}, {WIDTH})"]
        lines += ["m = self.table(words.flip(1)[:, : words.shape[1] - 1])"]
    elif memory == "learned":
        made += [f"self.learned = nn.Parameter(torch.randn(1, 5, {WIDTH}))"]
        lines += ["m = self.learned.expand(x.shape[0], -1, -1)"]
    else:
        lines += {
            "every second": ["m = x[:, ::2]"],
            "pooled": ["m = F.adaptive_avg_pool1d(x.transpose(1, 2), 3).transpose(1, 2)"],
            "first half": ["m = x[:, : (x.shape[1] + 1) // 2]"],
            "same": ["m = x"],
        }[memory]
    if form == "module":
        made = [each for each in made if "self.q" not in each]
        made += [f"self.mixer = nn.MultiheadAttention({WIDTH}, {HEADS}, batch_first=True)"]
        return _class(name, made, [*lines, "return self.mixer(x, m, m, need_weights=False)[0]"])
    if form == "one linear":
        made += [f"self.kv = nn.Linear({WIDTH}, {2 * WIDTH})"]
        lines += ["k, v = self.kv(m).chunk(2, -1)"]
    else:
        made += [f"self.k, self.v = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})"]
        lines += ["k, v = self.k(m), self.v(m)"]
    lines += [
        f"q, k, v = (each.unflatten(-1, ({HEADS}, {SIZE})).transpose(1, 2) for each in (self.q(x), k, v))"
    ]
    lines += [
        "mixed = F.scaled_dot_product_attention(q, k, v)"
        if how == "sdpa"
        else f"mixed = ((q @ k.mT) * {SIZE}**-0.5).softmax(-1) @ v"
    ]
    return _class(name, made, [*lines, "return self.out(mixed.transpose(1, 2).flatten(2))"])


def mixture(name: str, picks: Picks) -> str:
    """Experts, as modules or in weights of three dimensions."""
    how = picks.of("loop", "weights", "all")
    experts = picks.of("4", "3", "6")
    scores = picks.of("softmax", "sigmoid", "softmax of the best")
    best = picks.of("2", "1")
    shared = picks.of("none", "one")
    made = [f"self.router = nn.Linear({WIDTH}, {experts}, bias=False)"]
    lines = ["shape = x.shape", f"x = x.reshape(-1, {WIDTH})", "logits = self.router(x)"]
    if scores == "softmax of the best":
        lines += [f"weights, chosen = logits.topk({best}, -1)", "weights = weights.softmax(-1)"]
    else:
        lines += [
            "weights = logits.softmax(-1)" if scores == "softmax" else "weights = logits.sigmoid()",
            f"weights, chosen = weights.topk({best}, -1)",
        ]
    if how == "weights":
        made += [
            f"self.up = nn.Parameter(torch.randn({experts}, {WIDTH}, 12) * 0.2)",
            f"self.down = nn.Parameter(torch.randn({experts}, 12, {WIDTH}) * 0.2)",
        ]
        lines += [
            f"each = torch.zeros(x.shape[0], {experts}, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)",
            f"h = torch.bmm(torch.relu(torch.bmm(x[None].expand({experts}, -1, -1), self.up)), self.down)",
            "y = (h * each.t()[..., None]).sum(0)",
        ]
    else:
        made += [
            "self.experts = nn.ModuleList(",
            f"    nn.Sequential(nn.Linear({WIDTH}, 12), nn.GELU(), nn.Linear(12, {WIDTH})) for _ in range({experts}))",
        ]
        lines += ["y = torch.zeros_like(x)"]
        lines += (
            [
                "for number, expert in enumerate(self.experts):",
                "    at, rank = torch.where(chosen == number)",
                "    y.index_add_(0, at, expert(x[at]) * weights[at, rank, None])",
            ]
            if how == "loop"
            else [
                "for number, expert in enumerate(self.experts):",
                "    y = y + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)",
            ]
        )
    if shared == "one":
        made += [f"self.first, self.second = nn.Linear({WIDTH}, 12), nn.Linear(12, {WIDTH})"]
        lines += ["y = y + self.second(F.silu(self.first(x)))"]
    return _class(name, made, [*lines, "return y.view(shape)"])


ALONG = {
    "scale": ([f"self.weight = nn.Parameter(torch.ones({WIDTH}))"], ["return x * self.weight"]),
    "mean": ([], ["return x - x.mean(1, keepdim=True)"]),
    "max": ([], ["return x.amax(1, keepdim=True) + x"]),
    "shift": ([], ["return F.pad(x, (0, 0, 1, 0))[:, :-1]"]),
    "shift by cat": ([], ["return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)"]),
    "roll": ([], ["return x.roll(1, 1)"]),
    "flip": ([], ["return x.flip(1)"]),
    "cumulative": ([], ["return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]"]),
    "convolution": (
        [f"self.conv = nn.Conv1d({WIDTH}, {WIDTH}, 3, padding=1, groups={WIDTH})"],
        ["return self.conv(x.transpose(1, 2)).transpose(1, 2)"],
    ),
    "mixed": (
        ["self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)"],
        ["return self.mix[: x.shape[1], : x.shape[1]] @ x"],
    ),
    "by words": ([], ["return x.masked_fill((words == 0)[..., None], 0.0)"]),
    "gathered": (
        [],
        [
            "order = words.argsort(dim=1, stable=True)",
            "return x.gather(1, order[..., None].expand_as(x))",
        ],
    ),
    "first": ([], ["return x + x[:, :1]"]),
    "last": ([], ["return x - x[:, -1:]"]),
    "in place": ([], ["x = x.clone()", "x[:, 0] = 0.5", "x[:, 1:] += x[:, :-1].detach()", "return x"]),
    "even": ([], ["return torch.cat([x[:, ::2], x[:, 1::2]], 1)"]),
    "noted": ([], ["self.noted = x.detach()", "return x * self.noted.std()"]),
    "number": ([], ["return x * (2.0 if x.detach().mean().item() > 0 else 0.5)"]),
    "token": (
        [f"self.token = nn.Parameter(torch.zeros(1, 1, {WIDTH}))", f"self.mix = nn.Linear({WIDTH}, {WIDTH})"],
        [
            "y = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)",
            "y = F.scaled_dot_product_attention(y, self.mix(y), y)",
            "return y[:, 1:]",
        ],
    ),
    "transform": ([], ["return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real / 8"]),
    "recurrent": (
        [f"self.rnn = nn.GRU({WIDTH}, {WIDTH}, batch_first=True)"],
        ["return self.rnn(x)[0]"],
    ),
    "state": (
        [f"self.decay = nn.Parameter(torch.full(({WIDTH},), 0.5))"],
        [
            "state, states = torch.zeros_like(x[:, 0]), []",
            "for position in range(x.shape[1]):",
            "    state = state * self.decay + x[:, position]",
            "    states.append(state)",
            "return torch.stack(states, 1)",
        ],
    ),
    "norm along": ([], ["return F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2)"]),
    "parity": (
        [f"self.even, self.odd = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})"],
        ["return torch.where((words % 2 == 0)[..., None], self.even(x), self.odd(x))"],
    ),
    "chosen": (
        [f"self.chosen = nn.Linear({WIDTH}, {WIDTH})"],
        ["some = words != 0", "y = torch.zeros_like(x)", "y[some] = self.chosen(x[some])", "return y"],
    ),
    "statistics": (
        [f"self.statistics = nn.BatchNorm1d({WIDTH}, track_running_stats=False)"],
        ["return self.statistics(x.transpose(1, 2)).transpose(1, 2)"],
    ),
    "skipped": (
        [f"self.skipped = nn.Linear({WIDTH}, {WIDTH})"],
        ["return self.skipped(x) if int(words.sum()) % 2 else x * 0.5"],
    ),
    "pooled": ([], ["return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)"]),
    "bilinear": (
        [f"self.left, self.right = nn.Linear({WIDTH}, 12), nn.Linear({WIDTH}, 12)"],
        ["a, b = self.left(x), self.right(x)", "return (a @ b.transpose(1, 2)).tanh() @ x"],
    ),
    "linear attention": (
        [f"self.qk, self.v = nn.Linear({WIDTH}, 24), nn.Linear({WIDTH}, {WIDTH})"],
        [
            "q, k = F.elu(self.qk(x)).add(1).chunk(2, -1)",
            "return torch.einsum('btk,bsk,bsd->btd', q, k, self.v(x)) / x.shape[1]",
        ],
    ),
}  # fmt: skip
"""What happens along the sequence: what is made, and what it gives."""


def along(name: str, picks: Picks) -> str:
    key = [*ALONG][(picks.number(12) * 12 + picks.number(12)) % len(ALONG)]
    made, lines = ALONG[key]
    return _class(name, made or ["pass"], [f"# {key}", *lines])


WRITERS = {"attention": attention, "mlp": mlp, "mixture": mixture, "along": along, "cross": cross}
