"""Choices from what was measured: by a running job of its own steps, and by a trace; and what steps say of them."""
