"""Records what happened, at a cost that does not change it."""
