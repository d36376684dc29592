"""What ranks can cut of a model, decided with one microbatch: weights, and sequences."""
