"""The ranks and what connects them."""
