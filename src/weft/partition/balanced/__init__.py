"""Placements of a graph of operations: few bytes between partitions, under two balances."""
