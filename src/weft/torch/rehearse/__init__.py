"""A rehearsal: the script runs in one process as rank 0 of a job whose other ranks, devices and weights are not there.

Weights have no memory, the first training step is traced and planned, and nothing is trained or sent. The answer says
whether each rank's part fits its device, and what a step takes there.
"""
