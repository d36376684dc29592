"""Whether a step that is cut into microbatches, and split, gives what one process gives for the whole batch."""
