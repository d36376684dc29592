"""PyTorch's insides, as far as weft must know them.

Private names stand here, and those of process groups in ``weft.transport.private_c10d``. A new release of PyTorch
changes these files and no others.
"""
