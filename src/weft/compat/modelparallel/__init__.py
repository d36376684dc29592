"""The names of ``smdistributed.modelparallel.torch``, on ``weft.torch``."""
