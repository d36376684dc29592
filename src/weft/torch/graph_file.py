"""The former name of ``weft.torch.example_graph``."""

from weft.torch.example_graph import Example, load_example, traced_graph  # noqa: F401
