"""Ranks that stand still in an operation on a file: storage that does not answer, a pipe that nobody writes to.

operation       what a process of this host stands in, and for how long; Linux shows it, so no call has to be wrapped
blocked_ranks   what all ranks of a job show of that, in words; and the file by which other commands hear of it
"""
