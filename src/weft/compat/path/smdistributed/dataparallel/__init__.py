"""Data parallelism under the name that existing scripts import."""

__version__ = "1.8.0"
