"""The names of the original's second version: ``import torch.sagemaker as tsm``, over PyTorch's own FSDP.

A rank of such a script has a whole program of its own, so these parts use PyTorch, not weft's steps.
"""
