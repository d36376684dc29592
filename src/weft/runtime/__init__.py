"""One rank obeying its schedule: microbatches as threads of which one runs at a time."""
