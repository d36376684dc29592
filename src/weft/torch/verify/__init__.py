"""The proof that a split step does what one process does.

``compare`` proves it at the first step; ``self_check`` tries weft's own parts with a PyTorch that nobody has tested.
"""
