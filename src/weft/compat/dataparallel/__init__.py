"""The names of ``smdistributed.dataparallel``, on ``weft.torch.data_parallel``."""
