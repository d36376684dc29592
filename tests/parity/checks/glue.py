"""What a model does between its parts: operations, values read, shapes from data, writing in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models

from .harness import MICROBATCHES, WIDTH, check, placed, same_as_alone, seeded, vectors

ALTERNATING = {"a": 0, "b": 1, "c": 0, "d": 1}
OPPOSITE = {"a": 1, "b": 0, "c": 1, "d": 0}


class Between(models.Composed):
    """Four blocks and a function that uses them as it likes, with other parts if it needs some."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> None:
        super().__init__(run, **{name: models.Block() for name in "abcd"}, **more)


def glued(run: Callable[[Any, Tensor], Tensor], *shape: int) -> None:
    """Checks a network whose forward is `run(parts, x)`, split in three ways."""
    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Between, run), vectors(*shape), places=places)


@check
def operations_between_parts() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h, g = parts.a(x), parts.b(x)
        rows, width = h.shape
        assert isinstance(h, Tensor) and torch.is_tensor(g) and len(h) == rows and h.dim() == 2
        assert h.dtype is x.dtype and h.device == x.device and h.is_cuda == x.is_cuda and h.size(-1) == width
        z = torch.stack([h, g, x]).sum(0) / 3 + 1 - 2 * h.new_ones(1) ** 2
        z = (
            torch.where(z > 0, z, 0.1 * g) @ torch.eye(width, device=z.device)
            + torch.einsum("ij,ij->i", h, g)[:, None]
        )
        first, second = z.split([width // 2, width - width // 2], dim=1)
        z = torch.cat([second.clamp(min=-3), first.neg()], dim=1).unsqueeze(1).flatten(1)
        best = torch.topk(z, 3, dim=1)
        z = z + best.values.mean(1, keepdim=True) + z.max(dim=1, keepdim=True).values
        z = z.gather(1, torch.argsort(g, dim=1)) + torch.zeros_like(h) + h.mT.mT
        z = z.reshape(rows, 2, -1).permute(1, 0, 2).contiguous().transpose(0, 1).reshape(rows, width)
        return parts.d(parts.c(F.layer_norm(z, (width,)) - F.softplus(-h)) * x.abs().sqrt())

    glued(run)


@check
def iteration_unpacking_and_indexing() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        left, right = h.chunk(2, dim=1)
        rows = torch.stack([row * (1 + 0.1 * i) for i, row in enumerate(h)])
        picked = h[:, [0, 2, 4, 6]].repeat(1, 4) + h[..., None, 3] + h[:, -1:]
        h = parts.b(rows + picked + torch.cat((right, left), 1))
        one, *others = h.unbind(1)
        return parts.d(parts.c(torch.stack([*others, one], 1)))

    glued(run)


@check
def attention_in_glue() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        q, k, v = parts.a(x), parts.b(x), parts.c(x)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return parts.d(out.transpose(1, 2).flatten(2))

    glued(run, 5, WIDTH)


class Reversed(torch.autograd.Function):
    """The identity with the gradient's sign turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


@check
def autograd_functions_and_detached_values() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = Reversed.apply(parts.a(x), 0.5)
        with torch.no_grad():
            target = parts.b(h)
        h = parts.c(h) + (target.round() - h.detach())
        codes = h + (h.sign() - h).detach()
        return parts.d(codes) * parts.b(h)

    glued(run)


@check
def scripted_functions() -> None:
    """`torch.jit.script` where PyTorch still has it: the operations inside pass by every torch-function mode."""

    @torch.jit.script
    def mixed(x: Tensor, y: Tensor, times: int) -> Tensor:
        rows = torch.arange(x.size(1), device=x.device, dtype=x.dtype)
        return x * rows.repeat(times)[: x.size(1)] + y.tanh()

    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        return parts.d(mixed(parts.b(h), parts.c(h), 2)) + mixed(x, x, 1)

    glued(run)


@check
def whole_numbers_masks_and_other_types_between_parts() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = models.Block()
            self.table = nn.Embedding(WIDTH, WIDTH)

        def forward(self, x: Tensor, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
            h = self.block(x)
            if given is not None:
                h = h.double() * given["double"] + given["half"].double() + self.table(given["index"])
                h = h.float().masked_fill(given["mask"], 0.5) + given["empty"].sum()
            half = h.to(torch.bfloat16)
            made = {"h": h, "double": h.double(), "half": half, "index": h.argmax(1), "mask": h > 1}
            return {**made, "empty": h[:, :0]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (Kinds() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            made = None
            for part in (self.a, self.b, self.c, self.d):
                made = part(x, made)
                x = made["h"]
            return x

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Net), vectors(), places=places)


@check
def values_read_from_placed_tensors() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        times = 1 + int(h.detach().abs().sum().item() * 100) % 3
        for _ in range(times):
            h = parts.b(h)
        if (h.mean() > 0).item() or bool((h > 9).any()) or torch.equal(h, x):
            h = parts.c(h)
        scales = h.detach().mean(1).sigmoid().tolist()
        h = torch.stack([row * scale for row, scale in zip(h, scales, strict=True)])
        if float(h.detach().norm()) > 1e-3 and not torch.allclose(h, torch.zeros_like(h)):
            largest = h.detach().abs().max()
            h = h / max(1.0, float((largest.cpu() if largest.is_cuda else largest).numpy()))
        order = sorted(range(len(h)), key=h.detach().sum(1).cpu().numpy().tolist().__getitem__)
        return parts.d(h[order]) if h.sum() != 0 else h

    glued(run)


@check
def branches_chosen_by_data() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        for part in (parts.b, parts.c):
            if h.sum() > 0:
                h = part(h)
            else:
                h = h * 2
        return parts.d(h)

    glued(run)


@check
def shapes_from_data() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        rows, columns = (h > 0.5).nonzero(as_tuple=True)
        chosen = parts.b(h[rows])
        large = torch.masked_select(h, h > 0)
        h = torch.zeros_like(h).index_add(0, rows, chosen) / (1 + len(columns))
        h = h + large.mean() + large.numel() / 100 + h[h > 0].sum() / 50
        kinds = torch.unique(h.argmax(1))
        return parts.d(parts.c(h) * (1 + kinds.shape[0]))

    glued(run)


@check
def part_whose_shape_comes_from_data() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.inner(x)
            rows = (h.sum(1) > 0).nonzero().squeeze(1)
            return h[rows], rows

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = models.Block(), models.Block()
            self.b, self.d = Positive(), Positive()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            for part in (self.b, self.d):
                chosen, rows = part(h)
                h = h.index_add(0, rows, self.c(chosen))
            return h

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Net), vectors(), places=places)


@check
def mixture_of_experts() -> None:
    def net() -> nn.Module:
        return models.Composed(
            lambda net, x: net.second(x + net.first(x)), first=models.Mixture(), second=models.Mixture()
        )

    same_as_alone(seeded(net), vectors())
    experts = {f"{name}.experts.{i}": i % 2 for name in ("first", "second") for i in range(4)}
    same_as_alone(seeded(net), vectors(), places={"first.router": 1, "second.router": 0, **experts})


@check
def addition_in_place() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        h += parts.b(h.clone())
        h.add_(x).mul_(0.5)
        g = parts.c(h)
        g -= x
        g /= 2
        return parts.d(g.add_(h, alpha=0.3).tanh_())

    glued(run)


@check
def assignment_into_a_part_of_a_tensor() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x) * 1.5
        h[x > 1] = 0.0
        h[:, 0] = x[:, 1]
        h[:, 2:4] = parts.b(x)[:, :2]
        h[0] += 1
        g = parts.c(h) + 0
        g.masked_fill_(g > 2, 0.3)
        g[:, -1] = h.sum(1)
        return parts.d(g)

    glued(run)


@check
def results_of_parts_written_as_they_are() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        h[x > 0] = 0.25
        g = parts.b(h)
        g[:, 1] = 0.5
        g[g > 1] = 1.0
        k = parts.c(g)
        k.clamp_(min=-1)
        return parts.d(k).mul_(2.0)

    glued(run)


@check
def views_written_in_place() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x).clone()
        h[:, 0].add_(1)
        h.view(-1, 2, WIDTH // 2)[:, 1].mul_(parts.b(x)[:, : WIDTH // 2])
        half = h.narrow(1, 0, 4)
        half += x[:, :4]
        h.t()[5].zero_()
        g = parts.c(h).clone()
        left = g[:, : WIDTH // 2]
        left.copy_(h[:, : WIDTH // 2])
        return parts.d(g + half.sum(1, keepdim=True))

    glued(run)


@check
def views_of_a_tensor_written_after_a_message() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        q = parts.a(x)
        h, early = q.tanh() * 0.5, q.tanh() + 0.1
        first = early[:, :2]
        apart = early.detach()[:, 3]
        g = parts.b(q).tanh()  # q leaves its rank here: h and early are of an earlier segment there
        h += 1
        view = h[:, 1]
        h *= 0.5
        view += g[:, 0]
        h -= g
        early += 0.5
        first *= 0.7
        early[:, 1] += view
        second = early.view(-1)[1:]
        k = parts.c(h + early + view[:, None]).tanh()
        second -= k.reshape(-1)[:-1]
        assert early.shape == q.shape and second.shape == (q.numel() - 1,)
        return parts.d(k * early + first.sum(1, keepdim=True) + apart[:, None])

    glued(run)


@check
def a_view_written_first_after_a_message() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        q = parts.a(x)
        both = q * 0.5
        left, right = both[:, : WIDTH // 2], both[:, WIDTH // 2 :]
        del both
        g = parts.b(q).tanh()
        fresh = left[:, 1:3]
        fresh *= 0.5
        left += right
        right[0] = g[0, : WIDTH // 2]
        return parts.d(parts.c(g).tanh() + left.sum(1, keepdim=True) * right.mean() + fresh.sum())

    glued(run)


@check
def a_tensor_sent_before_and_after_a_view_of_it_is_used() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        g = parts.b(h)  # h leaves its rank
        part = h[:, :3].tanh()  # the first call of its kind may be one that writes
        return parts.d(parts.c(g)) + parts.b(h) * part.mean()

    glued(run)


@check
def a_tensor_sent_before_and_after_a_view_of_it_is_written() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        q = parts.a(x)
        g = parts.b(q.clone()).tanh()
        k = g + q  # on the rank of b, with q as it is
        view = q[:, 1:4]
        view *= 0.5
        return parts.d(k + parts.c(g + q))

    glued(run)


@check
def shapes_changed_in_place() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x).clone()
        middle = parts.b(x)  # what was there of h before this is of an earlier segment on its rank
        h.unsqueeze_(1)
        assert h.shape == (len(x), 1, WIDTH) and h.dim() == 3 and len(h) == len(x)
        h += middle[:, None]
        h.mul_(torch.arange(1.0, h.shape[1] + 1, device=x.device))
        assert h.size(1) == 1 and h.new_zeros(h.shape).shape == h.shape == torch.zeros_like(h).shape
        part = h[:, 0]
        part += 1
        g = parts.c(h.transpose_(0, 1).clone())
        assert g.shape == h.shape == (1, len(x), WIDTH)
        g = g.clone().squeeze_(0).t_()
        g = parts.d(g.swapaxes_(0, 1) + h.squeeze_(0).clone())
        row = torch.stack([g, h]).as_strided_((len(x), WIDTH), (WIDTH, 1))
        return row + h.mean(0) + g

    glued(run)


@check
def local_tensor_filled_with_placed_values() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        table = torch.zeros(len(x), 3, WIDTH, device=x.device)
        table[:, 0] = parts.a(x)
        table[:, 1] = parts.b(x)
        table[:, 2] += x
        flat = x.new_zeros(len(x), WIDTH)
        flat.add_(parts.c(x))
        flat.index_copy_(1, torch.tensor([1, 3], device=x.device), table[:, 0, :2])
        return parts.d(table.sum(1) + flat)

    glued(run)


@check
def parts_that_write_their_input() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            x[:, 0] = 0
            return self.inner(F.relu(x, inplace=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
            self.b, self.d = Greedy(), Greedy()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            g = self.b(h)
            g = self.c(g + h)
            return self.d(g * 2) + g + h

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Net), vectors(), places=places)


@check
def parameters_that_the_forward_pass_writes() -> None:
    """Microbatches do not overlap then, whatever the schedule: each one's gradients are of what it has written."""

    class Shrinks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.9)
            return super().forward(x)

    class Counts(Shrinks):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
                self.bias += x.mean()
            return nn.Linear.forward(self, x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Shrinks(WIDTH, WIDTH), Counts(WIDTH, WIDTH)
            self.c, self.d = models.Block(), models.Block()
            self.offset = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x) + self.offset) + self.offset
            with torch.no_grad():
                self.offset.mul_(0.9)
            return self.d(self.c(x)) + self.offset

    for places in (ALTERNATING, OPPOSITE, None):
        for pipeline in ("1f1b", "gpipe", "zb_h1"):
            same_as_alone(seeded(Net), vectors(), places=places, pipeline=pipeline)
    same_as_alone(seeded(Net), vectors(), pipeline="interleaved_1f1b")


@check
def averages_that_the_forward_pass_keeps_in_parameters() -> None:
    """A momentum encoder inside of a module: microbatches overlap, and each finds what the one before has left."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, online in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                    slow.mul_(0.9).add_(online, alpha=0.1)
                target = self.slow(x)
                self.slow.bias += target.mean(0)
            return self.online(x) * 2 - target

    def net() -> nn.Module:
        return models.Stack(a=Momentum(), b=models.Block(), c=Momentum(), d=models.Block())

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(net), vectors(), places=places)


@check
def writing_into_inputs_that_parts_return() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        q = parts.a(x)
        g = parts.b(q.clone()).tanh()
        k = g + q  # the rank of b or that of a has a copy
        same = parts.same(q)
        same *= 0.9
        k = parts.b(k + q)  # sees that
        whole, new = parts.through(q)
        part = whole[:, 1:4]
        part += g[:, :3]
        new += 1
        g = parts.c(g + q).tanh() + whole
        q *= 0.8
        return parts.d(part.mean(1, keepdim=True) + g + same + whole + new + k)

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(
            seeded(Between, run, same=nn.Sequential(), through=models.Composed(lambda net, x: (x, x * 0.5))),
            vectors(),
            places=places,
        )


@check
def writing_in_place_without_gradients() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        g = parts.b(h)
        h += g
        part = h[:, 1]
        k = parts.b(h)
        part -= k[:, 0]
        h.unsqueeze_(1)
        k = parts.d(h) * h.shape[1]
        h.squeeze_(1).mul_(0.5)
        return parts.c(h) + k[:, 0]

    x = vectors(steps=1)[0]["x"]
    for places in (ALTERNATING, OPPOSITE):
        for without in (torch.inference_mode, torch.no_grad):  # signatures are kept from one to the next
            net = seeded(Between, run)
            with without():
                expected = torch.cat([net(part) for part in x.chunk(MICROBATCHES)])
            model = placed(net, places)
            step = weft.step(lambda model, x: model(x))
            for _ in range(2):
                with without():
                    torch.testing.assert_close(step(model, x).concat(), expected)


@check
def parts_that_write_their_input_without_gradients() -> None:
    """The gradient goes past what was written, as in one process."""

    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.9).clamp_(-1, 1)
            return self.inner(x)

    class Returns(Clips):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            return x

    def net(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
        return Between(run, clips=Clips(), returns=Returns())

    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x) * 1.0
        k = parts.b(h + 0)
        with torch.no_grad():
            g = parts.clips(h)
            same = parts.returns(h)
        k = parts.c(h * 0.5 + k) + g
        h *= 2
        with torch.no_grad():
            parts.returns(k)
        return parts.d(same + k) + h + parts.b(k)

    def own(parts: Any, x: Tensor) -> Tensor:
        scale = x * parts.returns.inner.bias  # of the rank of `returns`
        with torch.no_grad():
            parts.clips(scale)
        return parts.a(scale) + parts.clips(parts.a(x) + 0.5)

    for places in (
        {**ALTERNATING, "clips": 1, "returns": 0},
        {**OPPOSITE, "clips": 1, "returns": 1},
        {**ALTERNATING, "clips": 0, "returns": 1},
        None,
    ):
        for body in (run, own):
            same_as_alone(seeded(net, body), vectors(), places=places)


@check
def views_of_what_all_ranks_have_get_what_one_computes() -> None:
    """The whole, and other views of it, are then that rank's, too."""

    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        own = x * 0.5
        part, other = own[:, 1:3], own[:, 2:]
        part += h[:, :2]
        h = parts.b(own + 0) + h + other.mean()
        part[:, 0] = 0.3
        row = own[0]
        row *= h[0]
        return parts.d(own + parts.c(h)) + own

    def filled(parts: Any, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), WIDTH, device=x.device)
        rows = out[:1]
        for number, part in enumerate((parts.a, parts.b, parts.c)):
            out[:, number].copy_(part(x).mean(1))
            x = x + out * 0.1 + rows.mean()
        with torch.no_grad():
            out[:, 7].add_(parts.d(out)[:, 0])
        return parts.d(out.clone()) + out

    for body in (run, filled):
        for places in (ALTERNATING, OPPOSITE, None):
            same_as_alone(seeded(Between, body), vectors(), places=places)


@check
def views_made_without_gradients() -> None:
    """They say that they need a gradient, and drop it; parts of every rank may use them."""

    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts.a(x)
        with torch.no_grad():
            wide = h[None].transpose(0, 1)
            k = parts.b(wide[:, 0])
        g = parts.c(wide[:, 0] * 2) + parts.d(h)
        return parts.b(g + wide[:, 0]) + k

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Between, run), vectors(), places=places)


@check
def views_of_pairs_as_complex_numbers() -> None:
    """As rotary embeddings are written; a view reads the memory of real numbers as complex ones, or turned over."""

    def run(parts: Any, x: Tensor) -> Tensor:
        h, g = parts.a(x), parts.b(x)
        angles = parts.c(x)[..., ::2]
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs, others = (torch.view_as_complex(each.reshape(*each.shape[:-1], -1, 2)) for each in (h, g))
        z = torch.view_as_real(pairs * turn).flatten(-2) + torch.view_as_real(others.conj() * turn).flatten(
            -2
        )
        real = torch.view_as_real(turn)
        return parts.d(z * real.flatten(-2) + h)

    glued(run)
