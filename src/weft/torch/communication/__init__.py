"""Python objects and tensors between ranks, between steps."""
