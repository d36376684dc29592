"""Rules about ranks that do the same: slow ones, sums of gradients, what a small share of a batch changes."""
