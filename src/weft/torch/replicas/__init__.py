"""Copies of the model on different data: what keeps them one model.

In: gradients as they arrive, on each replica. Out: their averages, in buckets, while the backward pass still runs.
"""
