"""A run beside its plan: the one that the job made itself (`beside`), or what `weft plan --json` wrote (`answer`)."""
