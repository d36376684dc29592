"""Saving a job and resuming it on any number of ranks; whole models in other people's formats.

save:    named_state (by names that do not depend on the split) -> saving -> tensor_files
resume:  restore (which one, agreed by all ranks) -> named_state -> model and optimizer
"""
