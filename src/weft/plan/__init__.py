"""The split and the schedule that take the least time: options, their simulated steps, and reasons for the choice."""
