"""Nested structures of tensors: lists, dicts and dataclasses with tensors somewhere inside.

In: what a script hands to a step, a module or another rank. Out: the same structure with other tensors, cut into
microbatches, described so that another rank can build it, or as text and bytes.
"""
