"""Calls for CUDA on a machine without it."""
