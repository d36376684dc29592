"""Replicas of the model, on different data, and the collectives that keep them alike.

In: gradients as they arrive, on each replica. Out: their averages, in buckets, while the backward pass still runs.
"""
