"""Graphs of operations for the tests: small ones drawn at random, and two with the shapes of known models."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.graph import Graph, Tensor, Unit


@st.composite
def small_graphs(draw, most=8, groups=False):
    """Up to `most` units with any tensors forwards; whole bytes."""
    count = draw(st.integers(1, most))
    small = st.integers(0, 9)
    names = st.sampled_from([None, None, "a", "b"]) if groups else st.none()
    units = [Unit(f"u{i}", draw(small), draw(small), draw(small), 1, group=draw(names)) for i in range(count)]
    tensors = []
    for source in range(count - 1):
        for _ in range(draw(st.integers(0, 2))):
            targets = draw(st.sets(st.integers(source + 1, count - 1), min_size=1, max_size=3))
            tensors.append(Tensor(f"u{source}", tuple(f"u{t}" for t in sorted(targets)), draw(small)))
    return Graph(units, tensors)


def graph_of(arrows, count):
    """Equal units u0, u1, ... with a tensor of 8 bytes for each arrow."""
    units = [Unit(f"u{i}", 1.0, 2.0, 100, 16) for i in range(count)]
    return Graph(units, [Tensor(f"u{one}", (f"u{other}",), 8) for one, other in arrows])


class Layers:
    """Writes a graph of operations layer by layer; `operations` and `variables` count those of each unit."""

    def __init__(self):
        self.units, self.tensors = [], []
        self.operations, self.variables = [], []

    def add(self, *sources, parameters=0, variables=0, operations=3, size=0, time=1.0):
        """A unit that uses the results of others; its number."""
        name = f"u{len(self.units)}"
        for source in sources:
            self.tensors[source][1].append(name)
        self.units.append(Unit(name, time, 2 * time, 4 * parameters, size, size, parameters))
        self.tensors.append((name, [], size))
        self.operations.append(operations)
        self.variables.append(variables)
        return len(self.units) - 1

    def graph(self):
        return Graph(self.units, [Tensor(name, tuple(to), size) for name, to, size in self.tensors if to])


def resnet50():
    """ResNet50 for pictures of 224 x 224, four a microbatch: 158 units, mostly convolution, BatchNorm, ReLU."""
    net = Layers()

    def convolution(source, inputs, outputs, kernel, side):
        size = 4 * 4 * outputs * side * side
        time = inputs * outputs * kernel * kernel * side * side / 1e8
        done = net.add(
            source, parameters=inputs * outputs * kernel**2, variables=2, operations=5, size=size, time=time
        )
        return net.add(done, parameters=4 * outputs, variables=4, operations=12, size=size, time=0.1)

    def relu(*sources, outputs, side):
        return net.add(*sources, operations=2, size=16 * outputs * side * side, time=0.05)

    first = net.add(operations=1, size=4 * 4 * 3 * 224 * 224, time=0.01)
    now, wide, side = relu(convolution(first, 3, 64, 7, 112), outputs=64, side=56), 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0 and width > 64:
                side //= 2
            skip = convolution(now, wide, 4 * width, 1, side) if block == 0 else now
            deep = relu(convolution(now, wide, width, 1, side), outputs=width, side=side)
            deep = relu(convolution(deep, width, width, 3, side), outputs=width, side=side)
            deep = convolution(deep, width, 4 * width, 1, side)
            now, wide = relu(skip, deep, outputs=4 * width, side=side), 4 * width
    pooled = net.add(now, operations=2, size=4 * 4 * 2048, time=0.01)
    net.add(pooled, parameters=2048 * 1000, variables=2, operations=5, size=4 * 4 * 1000, time=0.05)
    return net


def densenet121():
    """DenseNet121 for four pictures: each layer uses a concatenation of all before it in its block; 416 units."""
    net = Layers()
    now, wide, side = net.add(operations=1, size=4 * 4 * 3 * 224 * 224, time=0.01), 64, 56
    for _ in range(4):
        now = net.add(now, parameters=2352, variables=2, operations=5, size=16 * 64 * side * side)
    for layers in (6, 12, 24, 16):
        for _ in range(layers):
            deep = now
            for inputs, outputs, kernel in ((wide, 128, 1), (128, 32, 3)):
                deep = net.add(
                    deep, parameters=4 * inputs, variables=4, operations=12, size=16 * inputs * side**2
                )
                deep = net.add(deep, operations=1, size=16 * inputs * side**2, time=0.1)
                deep = net.add(
                    deep, parameters=inputs * outputs * kernel**2, variables=1, operations=3,
                    size=16 * outputs * side**2, time=inputs * outputs * kernel**2 * side**2 / 1e8,
                )  # fmt: skip
            wide += 32
            now = net.add(now, deep, operations=1, size=16 * wide * side**2, time=0.1)
        wide, side = wide // 2, max(7, side // 2)
        now = net.add(now, parameters=2 * wide * wide, variables=1, operations=3, size=16 * wide * side**2)
    net.add(now, parameters=wide * 1000, variables=2, operations=5, size=16 * 1000)
    return net


def gpt(layers=12, width=768, words=50257, tokens=64):
    """A chain of blocks with residual connections, and a mask that all of them use; four sequences a microbatch."""
    net, flow = Layers(), 4 * 4 * tokens * width
    mask = net.add(operations=4, size=4 * tokens * tokens, time=0.01)
    word = net.add(parameters=words * width, variables=1, operations=4, size=flow, time=0.3)
    place = net.add(parameters=tokens * width, variables=1, operations=4, size=flow, time=0.1)
    now = net.add(word, place, operations=1, size=flow, time=0.1)

    def dense(source, inputs, outputs):
        size = flow * outputs // width
        return net.add(
            source,
            parameters=inputs * outputs,
            variables=2,
            operations=6,
            size=size,
            time=inputs * outputs / 5e5,
        )

    for _ in range(layers):
        normed = net.add(now, parameters=2 * width, variables=2, operations=14, size=flow, time=0.1)
        heads = [dense(normed, width, width) for _ in range(3)]
        scores = net.add(heads[0], heads[1], mask, operations=8, size=16 * 12 * tokens**2, time=0.3)
        mixed = net.add(scores, heads[2], operations=4, size=flow, time=0.3)
        now = net.add(now, dense(mixed, width, width), operations=1, size=flow, time=0.05)
        normed = net.add(now, parameters=2 * width, variables=2, operations=14, size=flow, time=0.1)
        wide = net.add(dense(normed, width, 4 * width), operations=9, size=4 * flow, time=0.2)
        now = net.add(now, dense(wide, 4 * width, width), operations=1, size=flow, time=0.05)
    normed = net.add(now, parameters=2 * width, variables=2, operations=14, size=flow, time=0.1)
    net.add(normed, parameters=words * width, variables=1, operations=4, size=16 * tokens * words, time=40.0)
    return net
