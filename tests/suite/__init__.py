"""Chooses and runs tests: the usual ones, those of one room of the source, those that a change can touch."""
