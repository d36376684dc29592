"""Nested structures of tensors: cut into microbatches."""
