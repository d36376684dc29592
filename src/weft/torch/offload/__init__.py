"""Tensors that wait outside of a rank's device: the states of an optimizer, and activations.

Where the device is a GPU they wait in pinned host memory. On a CPU they wait in files, which the system writes to disk
where memory is short (the folder is ``TMPDIR``, or the system's own for temporary files).
"""
