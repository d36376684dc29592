"""Drawn programs for Keras: a model, how it is trained, and what the script does beside that."""
