"""What weft must know of PyTorch's insides.

Private names stand here, and those of process groups in ``weft.transport.private_c10d``. A new release of PyTorch
changes these files and no others.
"""
