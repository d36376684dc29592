"""Saving a job and resuming it on any number of ranks; whole models in other people's formats.

save:    named_state (by names that do not depend on the split) -> weft.checkpoint.save -> tensor_files
resume:  weft.checkpoint.agree (which save) -> restore -> named_state -> model and optimizer
"""
