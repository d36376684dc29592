"""The settings that make a script fastest: short trials of it, one after the other."""
