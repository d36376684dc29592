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
