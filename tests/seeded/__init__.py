"""Seeded faults, to measure which of them the tests catch."""
