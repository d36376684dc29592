"""Rules about the run itself: its recording, its start, its steps, and whether the model learns."""
