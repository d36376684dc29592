"""A job that Python started: the command that starts it, and what one can do with it then.

start (by `weft run` with the job's options, or by an engine) -> handle (its process, or Slurm's job)
"""
