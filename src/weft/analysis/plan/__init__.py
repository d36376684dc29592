"""A run beside its plan: the one that the job made itself, or what `weft plan --json` wrote."""
