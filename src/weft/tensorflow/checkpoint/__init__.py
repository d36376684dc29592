"""Saving a job and resuming it on any number of ranks; the whole model as a file that plain TensorFlow reads.

save:    contents (what, by names that do not depend on the split) -> weft.checkpoint.save -> tensor_files
resume:  weft.checkpoint.agree (which save) -> restore -> models, optimizers and variables
export:  every partition's variables on the first rank, which writes the model

``tf.train.Checkpoint`` is no container for that: with Keras 3 it leaves variables out without a word.
"""
