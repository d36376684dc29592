"""Files, settings and command lines with damage, drawn from a seed: each is read whole, or refused in one sentence.

samples.py    what is valid: one folder for each kind of thing that weft reads
mutate.py     what is done to it
targets.py    how it is read, and whether what was read is right
run.py        a child for each input, which may take 10 s and 500 MB
"""
