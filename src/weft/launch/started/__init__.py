"""A job that Python started: the command that starts it, and what one can do with it then.

command (a job as `weft run` with its options) -> handle (its process, or Slurm's job)
"""
