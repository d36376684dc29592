"""weft trains one model on many devices.

Importing this package brings in no framework; `import weft.torch` is the PyTorch frontend.
"""

__version__ = "0.1.0"
