"""One schedule a file: numbers of ranks, stages and microbatches in, one list of actions a rank out."""
