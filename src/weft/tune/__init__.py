"""Which settings make a script fastest: short trials of it, one after the other."""
