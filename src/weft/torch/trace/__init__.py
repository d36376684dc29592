"""One microbatch of the user's step, measured on one rank.

In: a model and a step's function. Out: a record for each module: times, bytes, operations, and which tensors cross.
Nothing of the run stays behind: `dry_run` says how.
"""
