"""Data parallelism for PyTorch."""
