"""Compares a step that is cut into microbatches with one process that has the whole batch."""
