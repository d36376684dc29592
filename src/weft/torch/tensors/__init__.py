"""Pytrees: lists, dicts and dataclasses with tensors somewhere inside.

In: what a script hands to a step, a module or another rank. Out, each in its file:

    pytree         their leaves, and the same structure with other tensors
    mini_batch     its parts for the microbatches of a step, and their weights
    description    JSON from which another rank builds the same structure
    serialise      JSON with tensors beside it: ``saved_values`` in checkpoints, ``messages`` between ranks
"""
