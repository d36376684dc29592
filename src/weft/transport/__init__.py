"""Moving tensors and small texts between the ranks of a pipeline."""
