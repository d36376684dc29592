"""Which split and which schedule take the least time: options, their simulated steps, and reasons for the choice."""
