"""This process's knowledge of its job: its ranks, its groups, and how tensors come to and from the network."""
