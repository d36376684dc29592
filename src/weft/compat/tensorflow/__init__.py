"""The names of ``smdistributed.modelparallel.tensorflow`` and ``horovod.tensorflow``, on ``weft.tensorflow``."""
