"""Ranks that stand still in an operation on a file: storage that does not answer, a pipe that nobody writes to.

operation   what a process of this host stands in, as Linux tells it: no call of a script has to be wrapped for that
look        one process looked at again and again: in what it stands, and for how long
told        what all ranks of a job show of that, in words; and the file by which other commands hear of it
"""
