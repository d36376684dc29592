"""Copies of the model: what is averaged over them, and what the first one hands to all."""
