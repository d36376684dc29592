"""Rules about processors, GPUs and memory."""
